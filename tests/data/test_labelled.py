import numpy as np
import pytest
from datasets import Dataset

from tests.data.rows import chosen, talk
from tests.data.templates import CHATML
from trimtab.data.examples import LabelledRenderer, build_labelled_dataset
from trimtab.errors import UserError


def build(tokenizer, *rows, **changes):
    options = chosen(**{"label_key": "label", "input_template": "User: {}\nAssistant: ", **changes})
    return build_labelled_dataset(Dataset.from_list(list(rows)), tokenizer, options)


KEYS = {"input_key": "q", "output_key": "a", "label_key": "score"}
ROWS = [
    {"prompt": "hello", "completion": " yes", "label": True},
    {"prompt": "fox:", "completion": " no", "label": False},
]


def test_keyed_rows_are_templated_and_labelled(make_tokenizer):
    tokenizer = make_tokenizer()
    rows = [{"q": "hello", "a": "yes", "score": 1}, {"q": "fox", "a": "no", "score": 0}]
    store, report = build(tokenizer, *rows, **KEYS)
    ids, trained = store.example(1)
    assert tokenizer.decode(ids) == "User: fox\nAssistant: no</s>"
    assert tokenizer.decode(ids[trained]).strip() == "no</s>"
    assert store.labels.dtype == bool and store.labels.tolist() == [True, False]
    assert "1 answers are desirable, 1 are not" in report.lines()


def test_known_layouts_are_recognised_without_key_options(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    store, _ = build(tokenizer, *ROWS)
    assert tokenizer.decode(store.example(0)[0]) == "hello yes</s>"
    messages = talk("q", "a")
    for row in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        store, _ = build(tokenizer, {**row, "label": True})
        ids, trained = store.example(0)
        assert tokenizer.decode(ids[trained]) == "a<|im_end|>" and trained[-1]


@pytest.mark.parametrize(
    "label, meaning", [(True, True), (0, False), (1.0, True), (0.0, False), ("1", True), ("False", False)]
)
def test_truth_values_and_ones_and_zeros_are_labels(make_tokenizer, label, meaning):
    store, _ = build(make_tokenizer(), {**ROWS[0], "label": label})
    assert store.labels.tolist() == [meaning]


@pytest.mark.parametrize("label", [2, -1, 0.5, "maybe", None])
def test_other_labels_are_refused_with_their_row(make_tokenizer, label):
    with pytest.raises(UserError, match="row 1 of the train data: column 'label' holds"):
        build(make_tokenizer(), {**ROWS[0], "label": label})


def test_missing_columns_are_one_line(make_tokenizer):
    with pytest.raises(UserError, match=r"no column 'label' \(--label_key\) in the data: found prompt, completion"):
        build(make_tokenizer(), {"prompt": "q", "completion": "a"})
    with pytest.raises(UserError, match="--output_key"):
        build(make_tokenizer(), {"text": "all of it", "label": True})


def test_mismatched_is_one_prompt_and_anothers_answer(make_tokenizer):
    tokenizer = make_tokenizer()
    store, _ = build(tokenizer, *ROWS)
    ids, trained = store.mismatched(0, 1)
    assert tokenizer.decode(ids) == "hello no</s>"
    assert tokenizer.decode(ids[trained]) == " no</s>"
    for index in range(2):
        same = store.mismatched(index, index)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(same, store.example(index)))


def test_mismatched_is_cut_but_keeps_an_answer(make_tokenizer):
    rows = [
        {"prompt": "q" * 49, "completion": "z" * 9, "label": True},
        {"prompt": "x", "completion": "z" * 99, "label": False},
    ]
    store, report = build(make_tokenizer(), *rows, max_len=50)
    assert (report.rows_kept, report.rows_truncated) == (2, 2)
    ids, trained = store.mismatched(0, 1)
    assert len(ids) == 50 and trained.sum() == 1
    ids, trained = store.mismatched(1, 0)
    assert len(ids) == 2 and trained.tolist() == [False, True]


def test_labels_follow_the_rows_that_are_kept(make_tokenizer):
    rows = [{"prompt": "q" * 300, "completion": "a", "label": True}, {"prompt": "q", "completion": "", "label": False}]
    store, report = build(make_tokenizer(), *rows, max_len=50)
    assert store.labels.tolist() == [False] and report.rows_over_long == 1
    assert store.example(0)[1].sum() == 1  # an empty answer is its end token


def test_the_cache_and_the_fingerprint_know_the_labels(make_tokenizer, monkeypatch):
    first, report = build(make_tokenizer(), *ROWS)
    other, _ = build(make_tokenizer(), ROWS[0], {**ROWS[1], "label": True})
    assert other.fingerprint != first.fingerprint
    monkeypatch.setattr(LabelledRenderer, "render", None)  # any rendering would fail
    again, known = build(make_tokenizer(), *ROWS)
    assert again.fingerprint == first.fingerprint and known == report and again.labels.tolist() == [True, False]
