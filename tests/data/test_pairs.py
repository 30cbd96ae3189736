import numpy as np
import pytest
from datasets import Dataset

from tests.data.rows import chosen, talk
from tests.data.templates import CHATML, LLAMA3
from trimtab.data import examples
from trimtab.data.dataset import TokenDataset
from trimtab.data.examples import PairDataset, build_pair_dataset
from trimtab.data.formats import answer_starts, common_length, dialogue_messages
from trimtab.errors import UserError


def build(tokenizer, *rows, **changes):
    return build_pair_dataset(Dataset.from_list(list(rows)), tokenizer, chosen(**changes))


def decoded(store, tokenizer, index=0):
    """(text, trained text) of both sides."""
    return [(tokenizer.decode(ids), tokenizer.decode(ids[trained])) for ids, trained in store.pair(index)]


Q, GOOD, BAD = "hello there?", "yes, it is four.", "no fox."
CHAT_PROMPT = "<|im_start|>user\nhello there?<|im_end|>\n<|im_start|>assistant\n"
AS_CHAT = [(CHAT_PROMPT + answer + "<|im_end|>", answer + "<|im_end|>") for answer in (GOOD, BAD)]


@pytest.mark.parametrize(
    "row, changes",
    [
        ({"prompt": Q, "chosen": GOOD, "rejected": BAD}, {"apply_chat_template": True}),
        ({"q": Q, "chosen": GOOD, "rejected": BAD}, {"apply_chat_template": True, "prompt_key": "q"}),
        ({"prompt": talk(Q), "chosen": GOOD, "rejected": BAD}, {}),
        ({"prompt": talk(Q), "chosen": talk(Q, GOOD)[1:], "rejected": talk(Q, BAD)[1:]}, {}),
        ({"prompt": Q, "chosen": talk(Q, GOOD)[1:], "rejected": talk(Q, BAD)[1:]}, {}),
        ({"prompt": Q, "chosen": talk(Q, GOOD), "rejected": talk(Q, BAD)}, {}),
        ({"prompt": talk(Q), "chosen": talk(Q, GOOD), "rejected": talk(Q, BAD)}, {}),
        ({"good": talk(Q, GOOD), "bad": talk(Q, BAD)}, {"chosen_key": "good", "rejected_key": "bad"}),
        (
            {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: {Q}\n\nAssistant: {BAD}"},
            {"apply_chat_template": True},
        ),
    ],
    ids=["strings", "key", "mixed", "explicit", "user turn", "repeated", "repeated list", "implicit", "dialogue"],
)
def test_every_conversational_layout_becomes_the_same_two_sequences(make_tokenizer, row, changes):
    tokenizer = make_tokenizer(CHATML)
    store, report = build(tokenizer, row, **changes)
    assert decoded(store, tokenizer) == AS_CHAT
    assert store.shared[0] == store.pair(0)[0][1].argmax() == store.pair(0)[1][1].argmax()
    assert (report.prompts_shared, report.tokens_shared) == (1, store.shared[0])


@pytest.mark.parametrize(
    "row, changes",
    [
        ({"prompt": "A:", "chosen": " yes", "rejected": " four"}, {}),
        ({"prompt": "A:", "chosen": "A: yes", "rejected": "A: four</s>"}, {}),
        ({"q": "A", "chosen": " yes", "rejected": " four"}, {"prompt_key": "q", "input_template": "{}:"}),
        ({"chosen": "A: yes", "rejected": "A: four"}, {}),
    ],
    ids=["explicit", "repeated", "template", "implicit"],
)
def test_every_plain_layout_ends_with_one_eos_and_trains_the_answers(make_tokenizer, row, changes):
    tokenizer = make_tokenizer()
    store, _ = build(tokenizer, row, **changes)
    assert decoded(store, tokenizer) == [("A: yes</s>", " yes</s>"), ("A: four</s>", " four</s>")]


def test_a_named_prompt_is_not_taken_off_answers_that_begin_with_it(make_tokenizer):
    tokenizer = make_tokenizer()
    store, _ = build(tokenizer, {"q": "yes", "chosen": "yes", "rejected": "yes it is"}, prompt_key="q")
    assert [text for text, _ in decoded(store, tokenizer)] == ["yesyes</s>", "yesyes it is</s>"]


def test_dialogues_as_text_train_the_last_answer_only(make_tokenizer):
    tokenizer = make_tokenizer()
    before = "\n\nHuman: one?\n\nAssistant: It is one.\n\nHuman: two?\n\nAssistant:"
    store, _ = build(tokenizer, {"chosen": before + " It is two.", "rejected": before + " It is four."})
    assert [trained for _, trained in decoded(store, tokenizer)] == [" It is two.</s>", " It is four.</s>"]
    assert tokenizer.decode(store.pair(0)[0][0][: store.shared[0]]) == before


def test_an_answer_begins_at_the_mark_both_share_unless_a_person_speaks_after_it():
    before = "\n\nHuman: q\n\nAssistant:"
    assert answer_starts(before + " a\n\nAssistant: b", before + " c") == (len(before), len(before))
    longer = before + " a\n\nHuman: more\n\nAssistant:"
    assert answer_starts(longer + " b", before + " c") == (len(longer), len(before))
    assert answer_starts("plain", "plane") is None


def test_prompts_that_differ_share_only_what_they_begin_with(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    row = {"chosen": talk("hello fox", GOOD), "rejected": talk("hello there", BAD)}
    store, report = build(tokenizer, row)
    (good, trained), (bad, _) = store.pair(0)
    shared = store.shared[0]
    assert 0 < shared < trained.argmax() and good[:shared].tolist() == bad[:shared].tolist()
    assert good[shared] != bad[shared]
    assert report.prompts_shared == 0


def test_sides_that_merge_with_the_prompt_differently_share_the_tokens_before(make_tokenizer):
    tokenizer = make_tokenizer()
    # " four" is one token of this tokenizer, a blank and "Z" are two.
    store, _ = build(tokenizer, {"prompt": "it is ", "chosen": "four", "rejected": "Z"})
    (good, first), (bad, second) = store.pair(0)
    assert tokenizer.decode(good[: store.shared[0]]) == "it is"
    assert (first.argmax(), second.argmax()) == (store.shared[0], store.shared[0] + 1)
    assert tokenizer.decode(bad) == "it is Z</s>"


@pytest.mark.parametrize("good, bad", [("the fox", "the fox, yes"), ("yes", "yes"), ("fox", "four")])
def test_texts_without_marks_keep_an_answer_on_each_side(make_tokenizer, good, bad):
    tokenizer = make_tokenizer()
    store, report = build(tokenizer, {"chosen": "a quick " + good, "rejected": "a quick " + bad})
    (first, trained), (second, also) = store.pair(0)
    shared = store.shared[0]
    assert trained.sum() == len(first) - shared > 0 and also.sum() == len(second) - shared > 0
    assert first[:shared].tolist() == second[:shared].tolist()
    assert report.rows_equal == (good == bad)


def test_sequences_end_with_the_answers_end_token_and_not_with_the_templates_newline(make_tokenizer):
    for template, end in ((CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>")):
        tokenizer = make_tokenizer(template)
        store, _ = build(tokenizer, {"prompt": talk(Q), "chosen": GOOD, "rejected": BAD})
        for ids, trained in store.pair(0):
            assert ids[-1] == tokenizer.convert_tokens_to_ids(end) and trained[-1]


def test_an_empty_answer_is_its_end_token(make_tokenizer):
    for tokenizer, changes in ((make_tokenizer(), {}), (make_tokenizer(CHATML), {"apply_chat_template": True})):
        store, _ = build(tokenizer, {"prompt": "q", "chosen": "yes", "rejected": ""}, **changes)
        _, trained = store.pair(0)[1]
        assert trained.sum() == 1 and trained[-1]


def test_long_sides_are_cut_and_pairs_without_an_answer_left_are_counted(make_tokenizer):
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "z" * 300},
        {"prompt": "q" * 300, "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": "z" * 300, "rejected": "z" * 400},
    ]
    store, report = build(make_tokenizer(), *rows, max_len=50)
    assert (report.rows_kept, report.rows_truncated, report.rows_over_long) == (2, 2, 1)
    assert len(store) == 2 and store.sequences.lengths.max() == 50
    assert report.rows_equal == 1  # cut, the last two are the same
    assert store.lengths.tolist() == [sum(len(ids) for ids, _ in store.pair(i)) for i in range(2)]
    assert store.lengths_sharing.tolist() == (store.lengths - store.shared).tolist()
    text = "\n".join(report.lines())
    assert "2 of 3 pairs" in text and "2 pairs share their prompt" in text and "1 pairs prefer nothing" in text


def test_margins_follow_the_pairs_that_are_kept(make_tokenizer):
    row = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    rows = [{**row, "margin": 2}, {**row, "prompt": "q" * 300, "margin": 3}, {**row, "margin": None}]
    store, _ = build(make_tokenizer(), *rows, max_len=50)
    assert store.margins.dtype == np.float32 and store.margins.tolist() == [2, 0]
    assert build(make_tokenizer(), row)[0].margins is None
    assert build(make_tokenizer(), {**row, "margin": "0.5"})[0].margins.tolist() == [0.5]  # as in a CSV file


def test_the_fingerprint_covers_margins_and_what_is_shared():
    sequences = TokenDataset(np.arange(4, dtype=np.int32), np.array([0, 1, 0, 1], dtype=bool), np.array([0, 2, 4]))
    shared = np.zeros(1, dtype=np.int32)
    stores = [
        PairDataset(sequences, shared),
        PairDataset(sequences, shared, np.zeros(1, dtype=np.float32)),
        PairDataset(sequences, shared, np.ones(1, dtype=np.float32)),
        PairDataset(sequences, shared + 1),
    ]
    assert len({store.fingerprint for store in stores}) == 4
    assert PairDataset(sequences, shared.copy()).fingerprint == stores[0].fingerprint
    with pytest.raises(IndexError):
        stores[0].pair(1)


def test_the_cache_answers_the_same_question_with_the_same_store(make_tokenizer, monkeypatch):
    row = {"prompt": "q", "chosen": "yes", "rejected": "no", "margin": 0.5}
    first, report = build(make_tokenizer(), row)
    with monkeypatch.context() as broken:
        broken.setattr(examples.PairRenderer, "render", None)  # any rendering would fail
        again, known = build(make_tokenizer(), row)
    assert isinstance(again.shared, np.memmap) and again.fingerprint == first.fingerprint
    assert known == report
    assert build(make_tokenizer(), {**row, "margin": 0.6})[0].fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "row, changes, words",
    [
        ({"a": "x", "rejected": "y"}, {}, "no column 'chosen' (--chosen_key) in the data: found a, rejected"),
        ({"chosen": "x", "rejected": "y"}, {"prompt_key": "q"}, "no column 'q' (--prompt_key)"),
        ({"chosen": "x", "rejected": None}, {}, "row 1 of the train data: column 'rejected' holds nothing"),
        ({"chosen": "x", "rejected": talk("q", "a")}, {}, "row 1 of the train data: of the columns"),
        ({"chosen": "x", "rejected": "y"}, {"apply_chat_template": True}, "row 1 of the train data: --apply_chat"),
        ({"chosen": "x", "rejected": "y"}, {"input_template": "{}"}, "--prompt_key"),
        ({"chosen": "x", "rejected": "y", "margin": "big"}, {}, "row 1 of the train data: column 'margin' holds a"),
        ({"chosen": talk("q"), "rejected": talk("q", "a")}, {}, "row 1 of the train data: the last turn is 'user'"),
    ],
)
def test_bad_rows_are_one_line_with_the_place(make_tokenizer, row, changes, words):
    with pytest.raises(UserError) as caught:
        build(make_tokenizer(CHATML), row, **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_dialogues_are_taken_apart_by_speaker():
    text = "\n\nHuman: one\n\ntwo\n\nAssistant: three\n\nAssistant: four"
    assert dialogue_messages(text) == talk("one\n\ntwo", "three\n\nfour")
    assert dialogue_messages("Human: one\n\nAssistant:") == talk("one", "")
    assert dialogue_messages("Once upon a time\n\nHuman: one") is None


def test_common_length_is_the_first_difference():
    for first, second in (("", "a"), ("abc", "abd"), ("abc", "abc"), ("abc", "abcdef"), ("xbc", "abc")):
        expected = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
        assert common_length(first, second) == expected
