"""The exact probability of bad words against enumeration through Hugging Face's own forward pass."""

import itertools
import math

import pytest
import torch

from tests.tiny import tiny_model
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.train.tail.measurements import log_bad_probability

VOCABULARY, END = 13, 2
PROMPT, BAD = [5, 9, 4], {7, 11}


def policy_of(family="llama", **changes):
    policy = Policy(tiny_model(family, vocab_size=VOCABULARY, **changes))
    choose_path(policy)
    return policy


def by_enumeration(model, length) -> float:
    """The sum over all whole answers with a bad token in them; an answer ends at its end token or at `length`."""
    answers = [a for n in range(length) for a in itertools.product(range(VOCABULARY), repeat=n) if END not in a]
    whole = [(*a, END) for a in answers] + [
        a for a in itertools.product(range(VOCABULARY), repeat=length) if END not in a
    ]
    total = 0.0
    for answer in whole:
        if not BAD.isdisjoint(answer):
            ids = torch.tensor([[*PROMPT, *answer]])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            places = torch.arange(len(PROMPT) - 1, ids.shape[1] - 1)
            total += logits.log_softmax(-1)[places, ids[0, places + 1]].sum().exp().item()
    return math.log(total)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_it_equals_the_sum_over_all_answers(family, length):
    policy = policy_of(family)
    found = log_bad_probability(policy, PROMPT, BAD, length, {END})
    assert found == pytest.approx(by_enumeration(tiny_model(family, vocab_size=VOCABULARY), length), abs=1e-4)


def test_three_tokens_and_passes_of_any_size_agree(monkeypatch):
    policy = policy_of()
    whole = log_bad_probability(policy, PROMPT, BAD, 3, {END})
    assert whole == pytest.approx(by_enumeration(tiny_model(vocab_size=VOCABULARY), 3), abs=1e-4)
    monkeypatch.setattr("trimtab.train.tail.measurements.PASS_TOKENS", 10)
    monkeypatch.setattr("trimtab.train.tail.measurements.chunk_tokens", lambda vocabulary, device: 3)
    assert log_bad_probability(policy, PROMPT, BAD, 3, {END}) == pytest.approx(whole, abs=1e-5)


def test_an_end_token_ends_the_answer():
    policy = policy_of()
    ended, endless = (log_bad_probability(policy, PROMPT, BAD, 2, stops) for stops in ({END}, ()))
    assert ended < endless


def test_what_cannot_be_summed_is_refused_in_one_line():
    policy = policy_of()
    with pytest.raises(UserError, match="at most 7"):
        log_bad_probability(policy, PROMPT, BAD, 8, {END})
    with pytest.raises(UserError, match="--bad_token_ids"):
        log_bad_probability(policy, PROMPT, {VOCABULARY}, 2, {END})
