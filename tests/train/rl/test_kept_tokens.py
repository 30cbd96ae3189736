"""tokens.jsonl: what is kept of single tokens."""

import math
from itertools import accumulate

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trimtab.data.tokenizer import byte_tokenizer
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.metrics import read_rows
from trimtab.train.rl import rollout_files
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_files import TokenTexts, token_fields

BYTES = byte_tokenizer("{{ messages }}")


def with_word_marks() -> PreTrainedTokenizerFast:
    """A tokenizer that drops the space before a text's first word."""
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "▁": 3}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("text", ["plain", "a ü b", "žluťoučký 日本語 🙂🙂 end", "", "\n\t "])
def test_texts_of_tokens_joined_are_the_text(text):
    ids = BYTES.encode(text, add_special_tokens=False)
    found = TokenTexts(BYTES).of(ids)
    assert len(found) == len(ids) and "".join(found) == text


def test_bytes_that_are_no_text_stay_with_their_tokens():
    ids = BYTES.encode("aü", add_special_tokens=False)
    assert TokenTexts(BYTES).of([ids[0], ids[1], ids[0]]) == ["a", "�", "a"]


def test_a_token_looks_as_it_does_within_a_text():
    tokenizer = with_word_marks()
    assert tokenizer.decode([0, 1, 2]) == "the cats"
    assert TokenTexts(tokenizer).of([0, 1, 2]) == [" the", " cat", "s"]


def one(tokens: list[int], drawn: list[bool] | None = None, advantages: list[float] | None = None) -> Experience:
    mask = None if drawn is None else np.array(drawn)
    count = len(tokens) if drawn is None else sum(drawn)
    log_probs = -np.arange(count, dtype=np.float32)
    experience = Experience.of([0], [Trajectory(0, 0, [1, 2], tokens, log_probs, "stop", drawn=mask)])
    if advantages is not None:
        experience.advantages_N = torch.tensor(advantages)
    return experience


def test_the_model_s_and_the_world_s_tokens_are_told_apart():
    letters = BYTES.encode("abcdef", add_special_tokens=False)
    drawn = [True, True, False, False, True, False]
    found = token_fields(one(letters, drawn, [0.5, 0.5, -1.0]), 0, TokenTexts(BYTES))
    assert found == {
        "texts": list("abcdef"),
        "drawn": [2, 2, 1, 1],
        "log_probs": [0.0, -1.0, -2.0],
        "advantages": [[0.5, 2], [-1.0, 1]],
    }
    assert token_fields(one(letters, [not mask for mask in drawn]), 0, TokenTexts(BYTES))["drawn"] == [0, 2, 2, 1, 1]


def test_of_a_long_answer_both_ends_are_kept(monkeypatch):
    monkeypatch.setattr(rollout_files, "FIRST", 3)
    monkeypatch.setattr(rollout_files, "LAST", 2)
    letters = BYTES.encode("abcdefgh", add_special_tokens=False)
    found = token_fields(one(letters, advantages=[float(i) for i in range(8)]), 0, TokenTexts(BYTES))
    assert found["texts"] == list("abcgh") and found["left_out"] == [3, 3] and found["drawn"] == [5]
    assert found["log_probs"] == [0, -1, -2, -6, -7] and [value for value, _ in found["advantages"]] == [0, 1, 2, 6, 7]
    assert "left_out" not in token_fields(one(letters[:5]), 0, TokenTexts(BYTES))


def test_what_is_not_finite_has_no_number():
    experience = one([5, 6])
    experience.sampled_N = torch.tensor([math.nan, -math.inf])
    assert token_fields(experience, 0, TokenTexts(BYTES))["log_probs"] == [None, None]


def test_a_run_keeps_the_tokens_of_every_answer_that_it_keeps(recorded):
    answers, tokens = (read_rows(recorded / f"{name}.jsonl") for name in ("rollouts", "tokens"))
    assert [(row["step"], row["answer"]) for row in answers] == [(row["step"], row["answer"]) for row in tokens]
    assert len({(row["step"], row["answer"]) for row in answers}) == len(answers) > 0
    for answer, row in zip(answers, tokens):
        assert "".join(row["texts"]) == answer["response"]
        assert sum(row["drawn"]) == len(row["log_probs"]) == answer["tokens"] and max(row["log_probs"]) <= 0
        if answer["group"] != "evaluation":
            counts = list(accumulate(count for _, count in row["advantages"]))
            mean = sum(value * count for value, count in row["advantages"]) / counts[-1]
            assert counts[-1] == answer["tokens"] and mean == pytest.approx(answer["advantage"], abs=1e-4)
