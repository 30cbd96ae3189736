import logging
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from tests.data.rows import chosen, talk
from tests.data.templates import CHATML, GENERATION
from trimtab.data import dataset, rendering
from trimtab.data.examples import TokenDataset, build_sft_dataset, tokenize_renderings
from trimtab.data.formats import Rendering
from trimtab.errors import UserError


def options(**changes):
    return chosen(**{"input_template": "User: {}\nAssistant: ", **changes})


def pairs(*rows):
    return Dataset.from_list([{"q": question, "a": answer} for question, answer in rows])


KEYS = {"input_key": "q", "output_key": "a"}


def decoded(store, tokenizer, index=0):
    ids, trained = store.example(index)
    return tokenizer.decode(ids), tokenizer.decode(ids[trained])


def test_a_keyed_pair_is_templated_and_only_the_response_is_trained(make_tokenizer):
    tokenizer = make_tokenizer()
    store, report = build_sft_dataset(pairs(("hello", "yes, four.")), tokenizer, options(**KEYS))
    text, trained = decoded(store, tokenizer)
    assert text == "User: hello\nAssistant: yes, four.</s>"
    assert trained.strip() == "yes, four.</s>"
    assert store.example(0)[0][-1] == tokenizer.eos_token_id
    assert (report.rows_read, report.rows_kept, report.tokens) == (1, 1, len(store.ids))


def test_a_recognised_pair_is_literal_and_text_is_trained_but_for_its_first_token(make_tokenizer):
    tokenizer = make_tokenizer()
    rows = Dataset.from_list([{"prompt": "The fox", "completion": " answers"}])
    store, _ = build_sft_dataset(rows, tokenizer, options())
    assert decoded(store, tokenizer) == ("The fox answers</s>", " answers</s>")
    own = build_sft_dataset(rows, tokenizer, options(input_template="Q: {} A:"))[0]
    assert decoded(own, tokenizer)[0] == "Q: The fox A: answers</s>"
    store, _ = build_sft_dataset(Dataset.from_list([{"text": "hello there"}]), tokenizer, options())
    assert decoded(store, tokenizer)[0] == "hello there</s>"
    assert not store.trained[0] and store.trained[1:].all()


def test_apply_chat_template_makes_turns_of_strings(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    store, _ = build_sft_dataset(pairs(("q", "a")), tokenizer, options(**KEYS, apply_chat_template=True))
    text, trained = decoded(store, tokenizer)
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert trained == "a<|im_end|>"


def test_pretrain_mode_trains_rendered_conversations_and_text_without_template(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    rows = Dataset.from_list([{"messages": talk("q", "a")}])
    store, _ = build_sft_dataset(rows, tokenizer, options(pretrain_mode=True))
    assert store.trained[1:].all()
    store, _ = build_sft_dataset(pairs(("one", "two")), tokenizer, options(input_key="q", pretrain_mode=True))
    assert decoded(store, tokenizer)[0] == "one</s>"


def test_masks_equal_the_tokenizers_own_for_a_template_with_generation_blocks(make_tokenizer):
    tokenizer = make_tokenizer(GENERATION)
    messages = talk("hello there", "yes, it is", "quick?", "brown fox")
    store, _ = build_sft_dataset(Dataset.from_list([{"messages": messages}]), tokenizer, options(multiturn=True))
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert store.ids.tolist() == theirs["input_ids"]
    assert store.trained.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]


def test_a_token_across_the_boundary_belongs_to_the_response(make_tokenizer):
    tokenizer = make_tokenizer()
    text = "it is four"
    (ids, trained), *_ = tokenize_renderings([Rendering(text, [(6, 10)])], tokenizer)
    first = tokenizer.decode(ids[trained])
    assert first == " four"  # the merged token begins at 5
    (ids, trained), *_ = tokenize_renderings([Rendering(text, [(0, 5)])], tokenizer)
    assert tokenizer.decode(ids[trained]) == "it is"


def test_tokens_of_trimmed_blanks_follow_the_span_they_stand_in(make_tokenizer):
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    text = "a    b    c"
    (ids, trained), *_ = tokenize_renderings([Rendering(text, [(5, 10)])], tokenizer)
    assert tokenizer.decode(ids[trained]) in ("b    ", " b    ")
    assert tokenizer.decode(ids[~trained]).startswith("a   ")


def test_multibyte_characters_keep_their_masks(make_tokenizer):
    tokenizer = make_tokenizer()
    (ids, trained), *_ = tokenize_renderings([Rendering("né→x", [(2, 3)])], tokenizer)
    assert tokenizer.decode(ids[trained]) == "→"


def test_a_tokenizer_without_offsets_is_given_the_pieces(make_tokenizer):
    fast = make_tokenizer()
    slow = SimpleNamespace(is_fast=False, encode=lambda text, **_: fast.encode(text, add_special_tokens=False))
    (ids, trained), *_ = tokenize_renderings([Rendering("hello there fox", [(6, 11)])], slow)
    assert fast.decode(ids) == "hello there fox"
    assert fast.decode(ids[trained]) == "there"


def test_long_rows_are_cut_and_rows_with_nothing_left_to_learn_are_counted(make_tokenizer):
    tokenizer = make_tokenizer()
    rows = pairs(("hi", "yes"), ("hi", "z" * 300), ("q" * 300, "yes"), ("hi", ""))
    store, report = build_sft_dataset(rows, tokenizer, options(**KEYS, max_len=100))
    assert (report.rows_kept, report.rows_truncated, report.rows_over_long, report.rows_empty) == (2, 1, 1, 1)
    assert store.lengths.max() == 100 == report.lengths["max"]
    assert store.example(1)[0][-1] != tokenizer.eos_token_id
    text = "\n".join(report.lines())
    assert "2 of 4 rows" in text and "1 rows cut to 100" in text and "nothing to learn within 100" in text
    assert report.as_dict()["trained_tokens"] == store.trained.sum()


def test_a_response_that_only_reaches_the_first_token_counts_as_nothing(make_tokenizer):
    rows = Dataset.from_list([{"text": "hello there"}, {"text": "hello there, quick brown fox"}])
    with pytest.raises(UserError, match=r"of 2, 2 have nothing to learn within 1 tokens \(raise --max_len\)"):
        build_sft_dataset(rows, make_tokenizer(), options(max_len=1))


def test_a_job_without_multiturn_and_pretrain_mode_gets_the_store_of_one_that_has_them_off(make_tokenizer):
    rows, tokenizer, lacking = pairs(("hi", "yes")), make_tokenizer(), options(**KEYS)
    del lacking.multiturn, lacking.pretrain_mode
    store, _ = build_sft_dataset(rows, tokenizer, lacking)
    assert store.fingerprint == build_sft_dataset(rows, tokenizer, options(**KEYS))[0].fingerprint
    assert isinstance(store.ids, np.ndarray) and len(list(dataset.cache_folder().iterdir())) == 1


@pytest.mark.parametrize("given, used", [(dict(num_workers=3), 3), ({}, min(rendering.MOST_WORKERS, 5))])
def test_num_workers_bounds_the_processes_that_many_rows_get(make_tokenizer, monkeypatch, given, used):
    monkeypatch.setattr(rendering, "PARALLEL_ROWS", 2)
    monkeypatch.setattr(rendering.os, "sched_getaffinity", lambda _: range(5), raising=False)
    counts = []

    def in_workers(rows, renderer, starts, chunk_rows, workers):
        counts.append(workers)
        return (renderer.render_rows(rows.to_list(), start) for start in starts)

    monkeypatch.setattr(rendering, "_render_in_workers", in_workers)
    rows, tokenizer = pairs(("hi", "yes"), ("fox", "no")), make_tokenizer(CHATML)
    build_sft_dataset(rows, tokenizer, options(**KEYS, apply_chat_template=True, **given))
    build_sft_dataset(rows, tokenizer, options(**KEYS, **given))  # plain text: one process
    build_sft_dataset(rows.select([0]), tokenizer, options(**KEYS, apply_chat_template=True, **given))
    assert counts == [used]


def test_a_bad_value_is_named_with_its_row(make_tokenizer):
    rows = pairs(("q", "a"), ("q", None))
    with pytest.raises(UserError, match="row 2 of the evaluation data: column 'a' holds nothing"):
        build_sft_dataset(rows, make_tokenizer(), options(**KEYS), what="evaluation")


def test_the_cache_answers_the_same_question_with_the_same_store(make_tokenizer, monkeypatch):
    rows, tokenizer = pairs(("hello", "yes"), ("fox", "four")), make_tokenizer()
    first, report = build_sft_dataset(rows, tokenizer, options(**KEYS))
    monkeypatch.setattr(rendering.SupervisedRenderer, "render_rows", None)  # any rendering would fail
    again, cached_report = build_sft_dataset(rows, make_tokenizer(), options(**KEYS))
    assert isinstance(again.ids, np.memmap)
    assert again.fingerprint == first.fingerprint
    assert [a.tolist() for a in again.example(1)] == [a.tolist() for a in first.example(1)]
    assert cached_report == report


@pytest.mark.parametrize("change", ["rows", "order", "template", "max_len", "chat", "tokenizer"])
def test_whatever_changes_the_tokens_changes_the_cache_key(make_tokenizer, change):
    rows, tokenizer, settings = pairs(("hello", "yes"), ("fox", "four")), make_tokenizer(CHATML), options(**KEYS)

    def key():
        return dataset.cache_key(rows, tokenizer, vars(settings))

    before = key()
    assert key() == before
    if change == "rows":
        rows = pairs(("hello", "yes"), ("fox", "fou"))
    elif change == "order":
        rows = rows.select([1, 0])
    elif change == "template":
        settings.input_template = "{}"
    elif change == "max_len":
        settings.max_len = 9
    elif change == "chat":
        tokenizer = make_tokenizer(GENERATION)
    else:
        tokenizer.add_tokens(["answers"])
    assert key() != before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no notes"])
def test_a_broken_cache_entry_is_made_again(make_tokenizer, damage):
    rows, tokenizer = pairs(("hello", "yes")), make_tokenizer()
    first, _ = build_sft_dataset(rows, tokenizer, options(**KEYS))
    (entry,) = dataset.cache_folder().iterdir()
    ids = entry / "ids.npy"
    if damage == "truncated":
        ids.write_bytes(ids.read_bytes()[:-5])
    elif damage == "flipped":
        ids.write_bytes(ids.read_bytes()[:-4] + b"\x01\x00\x00\x00")
    else:
        (entry / "notes.json").unlink()
    again, _ = build_sft_dataset(rows, tokenizer, options(**KEYS))
    assert again.ids.tolist() == first.ids.tolist()
    third, _ = build_sft_dataset(rows, tokenizer, options(**KEYS))
    assert isinstance(third.ids, np.memmap) and third.fingerprint == first.fingerprint
    assert list(dataset.cache_folder().iterdir()) == [entry]


def test_an_unwritable_cache_is_a_warning(make_tokenizer, tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRIMTAB_CACHE", str(blocked))
    with caplog.at_level(logging.WARNING):
        store, _ = build_sft_dataset(pairs(("q", "a")), make_tokenizer(), options(**KEYS))
    assert len(store) == 1 and "not cached" in caplog.text


def test_worker_processes_give_what_one_process_gives(make_tokenizer, caplog):
    tokenizer = make_tokenizer(CHATML)
    rows = pairs(*[(f"question {number}", f"answer {number}") for number in range(25)])
    settings = options(**KEYS, apply_chat_template=True)
    columns = rendering.SupervisedColumns("q", "a")

    def rendered(workers):
        renderer = rendering.SupervisedRenderer(columns, tokenizer, settings, "train")
        return [r for chunk in rendering.render_all(rows, renderer, workers=workers, chunk_rows=4) for r in chunk]

    assert rendered(2) == rendered(1)
    assert "one process" not in caplog.text


def test_fingerprint_depends_on_content_alone():
    ids, trained, offsets = np.arange(4, dtype=np.int32), np.ones(4, dtype=bool), np.array([0, 1, 4])
    store = TokenDataset(ids, trained, offsets)
    assert store.fingerprint == TokenDataset(ids.copy(), trained.copy(), offsets.copy()).fingerprint
    assert store.fingerprint != TokenDataset(ids, trained, np.array([0, 2, 4])).fingerprint
    assert store.fingerprint != TokenDataset(ids, ~trained, offsets).fingerprint
    assert len(store) == 2 and store.lengths.tolist() == [1, 3]
    with pytest.raises(IndexError):
        store.example(2)
