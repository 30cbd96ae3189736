"""The LM head's kernels against autograd over full logits. Without an accelerator they run in Triton's interpreter."""

import math

import pytest
import torch
from torch import nn

from tests.models.test_lm_head import full_logits
from tests.rollout.kernel_device import DEVICE
from trimtab.models import lm_head_kernels as kernels
from trimtab.models.lm_head import LogitRows, LogitShape, logit_gradient, read_logits, token_log_probs


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch):
    """The head asks for them, and rows take several turns."""
    monkeypatch.setattr("trimtab.models.lm_head.has_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "STRETCH", 16)
    monkeypatch.setattr(kernels, "TURNED", (16, 1))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.3), LogitShape(scale=1.7, softcap=5.0)])
@pytest.mark.parametrize("temperature, bias", [(1.0, False), (0.7, True)])
def test_values_and_gradients_equal_those_of_full_logits(shape, temperature, bias, entropy):
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 50, bias=bias).to(DEVICE), torch.randn(11, 16, device=DEVICE, requires_grad=True)
    targets, weights = torch.randint(50, (11,), device=DEVICE), torch.randn(2, 11, device=DEVICE)
    weights[1] *= entropy
    ours = token_log_probs(hidden, head, targets, shape=shape, temperature=temperature, entropy=entropy, chunk=4)
    theirs = full_logits(hidden, head, targets, shape, temperature)
    for mine, expected in zip(ours[: 1 + entropy], theirs):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    tensors = [hidden, *head.parameters()]
    gradients = []
    for log_probs, entropies in (ours, theirs):
        loss = log_probs @ weights[0] + (0 if entropies is None else entropies @ weights[1])
        gradients.append(torch.autograd.grad(loss, tensors))
    for mine, expected in zip(*gradients):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_rows_of_great_and_of_no_numbers_are_read_as_torch_reads_them():
    raw = torch.randn(5, 70, device=DEVICE) * 3
    raw[0] += 3e4
    raw[1, :40] = -math.inf  # whole turns of nothing
    raw[2, 33] = math.nan
    raw[3] = 2.0
    raw[4, 69] = 1e6
    places = torch.tensor([69, 50, 3, 0, 69], device=DEVICE)
    chosen, normalisers, means = read_logits(raw, places, LogitShape(), 1.0, False)
    assert means is None
    torch.testing.assert_close(normalisers, raw.logsumexp(-1), equal_nan=True)
    assert torch.equal(chosen, raw.gather(1, places[:, None])[:, 0])
    apart = torch.stack([places, places + 100], 1)[:, 0]
    assert torch.equal(read_logits(raw, apart, LogitShape(), 1.0, False)[0], chosen)


def test_words_of_others_get_no_share_of_the_target():
    """As where the vocabulary is cut: log Z is that of all words, and some targets are elsewhere."""
    raw, places = torch.randn(6, 40, device=DEVICE), torch.arange(6, device=DEVICE) * 7
    here = torch.tensor([1.0, 0, 1, 0, 0, 1], device=DEVICE)
    pull, of_entropy = torch.randn(2, 6, device=DEVICE)
    rows = LogitRows(places, raw.logsumexp(-1) + 0.5, torch.randn(6, device=DEVICE), pull, pull * here, of_entropy)
    settings = (LogitShape(softcap=4.0), 0.9)
    p = torch.exp((4 * torch.tanh(raw / 4)) / 0.9 - rows.normalisers[:, None])
    centred = (4 * torch.tanh(raw / 4)) / 0.9 - rows.means[:, None]
    expected = -p * (pull[:, None] + of_entropy[:, None] * centred)
    expected[torch.arange(6), places] += pull * here
    expected *= (1 - torch.tanh(raw / 4).square()) / 0.9
    torch.testing.assert_close(logit_gradient(raw.clone(), rows, *settings, torch.float32, None), expected)
    half = logit_gradient(raw.clone(), rows, *settings, torch.bfloat16, None)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=1e-3, rtol=2**-7)  # the interpreter cuts off
