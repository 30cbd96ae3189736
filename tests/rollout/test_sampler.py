"""Drawing is exact: 200,000 draws on a tiny vocabulary against the distribution worked out apart."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trimtab.rollout.builtin.sampler import Sampler, uniform
from trimtab.rollout.sampling import SamplingParams

COUNT, VOCABULARY = 200_000, 13
LOGITS = torch.linspace(-2, 2, VOCABULARY)[torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))]
SEEDS = torch.arange(COUNT)  # as users number them


SHARES = np.exp(LOGITS.double().numpy())


def draws(sampling: SamplingParams, position: int = 0) -> np.ndarray:
    sampler = Sampler(sampling, VOCABULARY, torch.device("cpu"))
    drawn = sampler.draw(LOGITS.expand(COUNT, -1), SEEDS, torch.full_like(SEEDS, position), None)
    return drawn.tokens_B.numpy()


def assert_frequencies(counts: np.ndarray, shares: np.ndarray) -> None:
    assert counts[shares == 0].sum() == 0
    expected = shares[shares > 0] * counts.sum()
    chi_square = ((counts[shares > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


def renormalised(shares: np.ndarray, keep) -> np.ndarray:
    left = np.zeros_like(shares)
    left[keep] = shares[keep]
    return left / left.sum()


def assert_drawn(shares: np.ndarray, keep, sampling: SamplingParams, position: int = 0) -> None:
    counts = np.bincount(draws(sampling, position), minlength=VOCABULARY)
    assert_frequencies(counts, renormalised(shares, keep))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("position", [0, 7])
def test_temperature(temperature, position):
    assert_drawn(SHARES ** (1 / temperature), ..., SamplingParams(temperature=temperature), position)


def test_top_k():
    assert_drawn(SHARES, np.argsort(-SHARES)[:5], SamplingParams(top_k=5))


def test_top_p_keeps_the_token_that_crosses_the_line():
    order = np.argsort(-SHARES)
    reached = np.cumsum(SHARES[order]) / SHARES.sum()
    keep = order[: np.searchsorted(reached, 0.8) + 1]
    assert reached[len(keep) - 2] < 0.8 <= reached[len(keep) - 1]
    assert_drawn(SHARES, keep, SamplingParams(top_p=0.8))


def test_min_new_tokens_takes_stop_tokens_out_and_lets_them_in_again():
    sampling = SamplingParams(min_new_tokens=3, stop_token_ids=(2, 5))
    assert_drawn(SHARES, [token for token in range(VOCABULARY) if token not in (2, 5)], sampling, position=2)
    assert_drawn(SHARES, ..., sampling, position=3)


def reference_draw(logits_BV, seeds_B, drawn_B, temperature):
    """Stands for the kernel."""
    drawn = Sampler(SamplingParams(temperature=temperature), logits_BV.shape[1], logits_BV.device).draw(
        logits_BV.clone(), seeds_B, drawn_B, None
    )
    return drawn.tokens_B, drawn.log_probs_B


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_kernel_that_knows_no_stop_tokens_draws_without_them_while_they_must_wait(monkeypatch, temperature):
    sampling = SamplingParams(min_new_tokens=3, stop_token_ids=(2, 5), temperature=temperature, plain_log_probs=True)
    logits, seeds, drawn = LOGITS.repeat(1000, 1), SEEDS[:1000], SEEDS[:1000] % 6
    expected = Sampler(sampling, VOCABULARY, torch.device("cpu")).draw(logits, seeds, drawn, None)
    name = "trimtab.rollout.builtin.kernels.decode_step"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(sample_temperature_only=reference_draw))
    by_kernel = Sampler(sampling, VOCABULARY, torch.device("cpu"))._draw_by_kernel(logits, seeds, drawn)
    assert torch.equal(by_kernel.tokens_B, expected.tokens_B)
    torch.testing.assert_close(by_kernel.log_probs_B, expected.log_probs_B)
    torch.testing.assert_close(by_kernel.plain_B, expected.plain_B)
    assert torch.equal(logits, LOGITS.repeat(1000, 1))


def test_successive_draws_of_a_request_are_independent():
    shares = SHARES / SHARES.sum()
    pairs = draws(SamplingParams(), 4) * VOCABULARY + draws(SamplingParams(), 5)
    assert_frequencies(np.bincount(pairs, minlength=VOCABULARY**2), np.outer(shares, shares).ravel())


def test_neighbouring_seeds_are_independent():
    u = uniform(SEEDS, torch.zeros_like(SEEDS)).numpy()
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(COUNT)
    assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / COUNT)
