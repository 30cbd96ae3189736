import pytest
import torch
from torch import nn

from trimtab.models.lm_head import LogitShape, token_log_probs


def full_logits(hidden, head, targets, shape, temperature):
    """The same from the whole [tokens, vocabulary] matrix, left to autograd."""
    logits = head(hidden) * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.3), LogitShape(scale=1.7, softcap=5.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_values_and_gradients_equal_those_of_full_logits(shape, temperature, bias, chunk):
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 50, bias=bias), torch.randn(37, 16, requires_grad=True)
    targets = torch.randint(50, (37,))
    weights = torch.randn(2, 37)
    tensors = [hidden, *head.parameters()]
    ours = token_log_probs(hidden, head, targets, shape=shape, temperature=temperature, entropy=True, chunk=chunk)
    theirs = full_logits(hidden, head, targets, shape, temperature)
    for mine, expected in zip(ours, theirs):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    gradients = [
        torch.autograd.grad((values[0] * weights[0] + values[1] * weights[1]).sum(), tensors)
        for values in (ours, theirs)
    ]
    for mine, expected in zip(*gradients):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_without_entropy_the_log_prob_gradient_is_the_same():
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(8, 20), torch.randn(5, 8, requires_grad=True), torch.randint(20, (5,))
    both = token_log_probs(hidden, head, targets, entropy=True)[0]
    alone, nothing = token_log_probs(hidden, head, targets)
    assert nothing is None
    for values in (both, alone):
        head.zero_grad()
        hidden.grad = None
        values.sum().backward()
        if values is both:
            expected = hidden.grad.clone(), head.weight.grad.clone()
    torch.testing.assert_close((hidden.grad, head.weight.grad), expected)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_still_do():
    head, hidden = nn.Linear(8, 20).requires_grad_(False), torch.randn(5, 8, requires_grad=True)
    token_log_probs(hidden, head, torch.arange(5))[0].sum().backward()
    assert head.weight.grad is None and hidden.grad.abs().sum() > 0


def test_a_head_of_several_modules_takes_the_module_path():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out_features = nn.Linear(8, 20), 20

        def forward(self, x):
            return self.inner(x) * 2

    torch.manual_seed(0)
    head, hidden, targets = Wrapped(), torch.randn(7, 8, requires_grad=True), torch.randint(20, (7,))
    ours, _ = token_log_probs(hidden, head, targets, chunk=3)
    expected, _ = full_logits(hidden, head, targets, LogitShape(), 1.0)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), [hidden, *head.parameters()]),
        torch.autograd.grad(expected.sum(), [hidden, *head.parameters()]),
    )
