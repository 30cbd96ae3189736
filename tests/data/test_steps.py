import numpy as np
import pytest
from datasets import Dataset

from tests.data.rows import chosen
from trimtab.data.examples import StepRenderer, build_step_dataset
from trimtab.data.formats import reward_token_ids
from trimtab.errors import UserError


def build(tokenizer, *rows, **changes):
    options = chosen(**{"label_key": "label", "placeholder_token": "#", "reward_tokens": ["+", "-"], **changes})
    return build_step_dataset(Dataset.from_list(list(rows)), tokenizer, options)


def targets(store, index=0):
    return store.example(index)[2].tolist()


def test_placeholders_are_marked_and_labels_become_numbers_of_reward_tokens(make_tokenizer):
    tokenizer = make_tokenizer()
    store, report = build(
        tokenizer, {"input": "q a# b#\n c#", "label": ["+", "-", "+"]}, {"input": "q#", "label": ["-"]}
    )
    ids, marked, values = store.example(0)
    assert tokenizer.decode(ids) == "q a# b#\n c#"
    assert (ids[marked] == tokenizer.convert_tokens_to_ids("#")).all() and marked.sum() == 3
    assert values.tolist() == [0, 1, 0] and values.dtype == np.float32 and not store.soft
    assert targets(store, 1) == [1] and len(store.targets) == store.sequences.trained.sum()
    assert "labels: 2 x '+', 2 x '-'" in report.lines()


@pytest.mark.parametrize(
    "labels, reward_tokens",
    [
        (["+", "-"], ["+", "-"]),
        (["+", "-"], ["Y", "N"]),
        (["Y", "N"], ["Y", "N"]),
        ([True, False], ["+", "-"]),
        ([1, 0], ["+", "-"]),
        ([1.0, 0.0], ["+", "-"]),
    ],
)
def test_every_spelling_of_a_certain_label_is_the_same_class(make_tokenizer, labels, reward_tokens):
    store, _ = build(make_tokenizer(), {"input": "a#b#", "label": labels}, reward_tokens=reward_tokens)
    assert targets(store) == [0, 1] and not store.soft


def test_one_uncertain_label_makes_all_targets_probabilities_of_the_first_token(make_tokenizer):
    rows = [{"input": "a#b#", "label": [0.25, 1.0]}, {"input": "a#", "label": [0.0]}]
    store, report = build(make_tokenizer(), *rows)
    assert store.soft and targets(store) == [0.25, 1] and targets(store, 1) == [0]
    assert "labels: probabilities" in report.lines()
    hard, _ = build(make_tokenizer(), rows[1])
    assert targets(hard) == [1] and hard.fingerprint != store.fingerprint


def test_without_reward_tokens_the_targets_are_the_labels_own_ids(make_tokenizer):
    tokenizer = make_tokenizer()
    store, _ = build(tokenizer, {"input": "a#b#", "label": ["+", "Z"]}, reward_tokens=None)
    assert targets(store) == [tokenizer.convert_tokens_to_ids(token) for token in "+Z"]


def test_more_than_two_reward_tokens_are_numbered_in_order(make_tokenizer):
    store, report = build(
        make_tokenizer(), {"input": "a#b#c#", "label": ["C", "A", "B"]}, reward_tokens=["A", "B", "C"]
    )
    assert targets(store) == [2, 0, 1]
    assert report.labels == {"A": 1, "B": 1, "C": 1}


def test_prompt_completions_labels_is_recognised_and_gets_its_placeholders(make_tokenizer):
    tokenizer = make_tokenizer()
    row = {"prompt": "fox?", "completions": [" yes #1", " no"], "labels": [True, False]}
    store, _ = build(tokenizer, row)
    ids, marked, values = store.example(0)
    assert tokenizer.decode(ids) == "fox? yes #1# no#"
    assert marked.sum() == 2 and marked[-1] and values.tolist() == [0, 1]


def test_a_placeholder_that_would_merge_with_its_neighbours_stays_its_own_token(make_tokenizer):
    tokenizer = make_tokenizer()
    merged = next(text for text in ("yes", "fox", "ello") if len(tokenizer.encode(text)) == 1)
    assert len(tokenizer.encode(merged[:-1])) >= 1
    last = merged[-1]
    row = {"prompt": "q: ", "completions": [merged[:-1], "b "], "labels": [True, False]}
    store, _ = build(tokenizer, row, placeholder_token=last)
    ids, marked, _ = store.example(0)
    assert tokenizer.decode(ids) == f"q: {merged}b {last}"
    assert marked.sum() == 2 and set(ids[marked].tolist()) == {tokenizer.convert_tokens_to_ids(last)}


def test_placeholders_inside_other_words_do_not_count(make_tokenizer):
    tokenizer = make_tokenizer()
    word = "fox"
    assert len(tokenizer.encode(word)) == 1 or len(tokenizer.encode(" " + word)) == 1
    store, _ = build(tokenizer, {"input": f"the {word} x", "label": [True]}, placeholder_token="x")
    ids, marked, _ = store.example(0)
    assert marked.sum() == 1 and tokenizer.decode(ids[marked]).strip() == "x"


def test_cutting_drops_the_labels_behind_and_counts(make_tokenizer):
    rows = [
        {"input": "q#" + "z" * 50 + "#", "label": [True, False]},
        {"input": "z" * 50 + "#", "label": [True]},
        {"input": "nothing", "label": []},
        {"input": "a#", "label": [False]},
    ]
    store, report = build(make_tokenizer(), *rows, max_len=20)
    assert [targets(store, i) for i in range(len(store))] == [[0], [1]]
    assert (report.rows_kept, report.rows_truncated, report.rows_over_long, report.rows_empty) == (2, 1, 1, 1)
    assert [store.example(i)[1].sum() for i in range(2)] == [1, 1]


def test_a_placeholder_at_the_very_beginning_goes_with_its_label(make_tokenizer):
    store, _ = build(make_tokenizer(), {"input": "#a#", "label": [True, False]})
    assert store.example(0)[1].tolist() == [False, False, True] and targets(store) == [1]


@pytest.mark.parametrize(
    "row, changes, words",
    [
        ({"input": "a#b#", "label": [True]}, {}, "row 1 of the train data: 1 labels for 2 placeholders '#'"),
        ({"input": "a", "label": [True]}, {}, "row 1 of the train data: 1 labels for 0 placeholders"),
        ({"input": "a#", "label": ["?"]}, {}, "row 1 of the train data: label '?' is none of --reward_tokens + -"),
        ({"input": "a#", "label": [2]}, {}, "row 1 of the train data: a label is a number (2)"),
        ({"input": "a#", "label": [1]}, {"reward_tokens": None}, "--reward_tokens"),
        ({"input": "a#", "label": [0.5]}, {"reward_tokens": ["A", "B", "C"]}, "exactly two --reward_tokens"),
        ({"input": "a#", "label": ["-+"]}, {"reward_tokens": None}, "row 1 of the train data: label '-+' is 2 tokens"),
        ({"input": "a#", "label": "+"}, {}, "row 1 of the train data: column 'label' holds a string"),
        ({"input": 3, "label": [1]}, {}, "row 1 of the train data: column 'input' holds a number (3)"),
        ({"input": "a#", "label": [1]}, {"placeholder_token": "##"}, "--placeholder_token '##' is 2 tokens"),
        ({"input": "a#", "label": [1]}, {"placeholder_token": None}, "--placeholder_token is not set"),
        ({"input": "a#", "label": [1]}, {"reward_tokens": ["++", "-"]}, "--reward_tokens '++' is 2 tokens"),
        ({"input": "a#", "label": [1]}, {"reward_tokens": ["+"]}, "at least two different tokens"),
        ({"input": "a#", "label": [1]}, {"label_key": "value"}, "no column 'value' (--label_key)"),
        ({"text": "a#", "labels": [1]}, {}, "prompt + completions + labels: found text, labels"),
        (
            {"prompt": "q", "completions": ["a", "b"], "labels": [True]},
            {},
            "row 1 of the train data: 1 labels for 2 steps",
        ),
    ],
)
def test_bad_rows_and_options_are_one_line_with_the_place(make_tokenizer, row, changes, words):
    with pytest.raises(UserError) as caught:
        build(make_tokenizer(), row, **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_reward_token_ids_keep_their_order(make_tokenizer):
    tokenizer = make_tokenizer()
    assert reward_token_ids(["-", "+"], tokenizer) == [tokenizer.convert_tokens_to_ids(token) for token in "-+"]


def test_the_cache_answers_the_same_question_with_the_same_store(make_tokenizer, monkeypatch):
    rows = [{"input": "a#b#", "label": [0.25, 1.0]}]
    first, report = build(make_tokenizer(), *rows)
    monkeypatch.setattr(StepRenderer, "render", None)  # any rendering would fail
    again, known = build(make_tokenizer(), *rows)
    assert isinstance(again.targets, np.memmap) and again.fingerprint == first.fingerprint
    assert again.soft is True and known == report and targets(again) == targets(first)
