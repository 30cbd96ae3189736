"""Log-probabilities (and entropies) of target tokens from hidden states, without holding [tokens, vocabulary].

    log p(y | h) = z_y - logsumexp(z),      z = cap(scale * (W h + b)) / temperature,   cap(z) = c tanh(z / c)

Tokens go through in chunks. The forward pass keeps one number a token (the logsumexp; two with entropy); the
backward pass computes the chunk's logits again. `scale` and `c` are what Granite, Cohere and Gemma-2 do to their
logits; for everyone else they are absent. Everything after the matrix product is fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LogitShape:
    """What a model does to W h + b before the softmax."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config) -> "LogitShape":
        scale = 1.0
        if getattr(config, "logits_scaling", None):  # Granite divides
            scale /= config.logits_scaling
        if getattr(config, "logit_scale", None):  # Cohere multiplies
            scale *= config.logit_scale
        return cls(scale, getattr(config, "final_logit_softcapping", None))


PLAIN = LogitShape()


def token_log_probs(
    hidden_ND: Tensor,
    head: nn.Module,
    targets_N: Tensor,
    *,
    shape: LogitShape = PLAIN,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fp32 log-prob of every target, and the entropy of every prediction when asked for."""
    if type(head) is nn.Linear:
        size = chunk or chunk_tokens(head.weight.shape[0], hidden_ND.device)
        log_probs, entropies = _ChunkedLogProbs.apply(
            hidden_ND, head.weight, head.bias, targets_N, shape, temperature, entropy, size
        )
        return log_probs, entropies if entropy else None
    # A head that is more than one matrix (LoRA on it, say): the module itself, chunk by chunk.
    vocabulary = head.out_features
    size = chunk or chunk_tokens(vocabulary, hidden_ND.device)
    pieces = [
        checkpoint(_from_module, h, head, y, shape, temperature, use_reentrant=False)
        for h, y in zip(hidden_ND.split(size), targets_N.split(size))
    ]
    log_probs, entropies = (torch.cat(p) for p in zip(*pieces))
    return log_probs, entropies if entropy else None


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens a chunk, so that its fp32 logits take 16 MiB on a CPU and 512 MiB on an accelerator."""
    budget = 2**22 if device.type == "cpu" else 2**27
    return max(1, budget // vocabulary)


def shaped_logits(raw: Tensor, shape: LogitShape, temperature: float) -> Tensor:
    logits = raw.float()
    if shape.scale != 1.0:
        logits = logits * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return logits if temperature == 1.0 else logits / temperature


def choice_log_probs(hidden_ND: Tensor, head: nn.Module, choices_K: Tensor, shape: LogitShape) -> Tensor:
    """Log-probs of a few tokens among themselves [N, K]: of a plain head only their rows are multiplied."""
    if type(head) is not nn.Linear:  # LoRA on it, say
        return shaped_logits(head(hidden_ND)[:, choices_K], shape, 1.0).log_softmax(-1)
    bias = None if head.bias is None else head.bias[choices_K]
    raw = nn.functional.linear(hidden_ND, head.weight[choices_K], bias)
    return shaped_logits(raw, shape, 1.0).log_softmax(-1)


def token_divergence(
    hidden_ND: Tensor,
    head: nn.Module,
    shape: LogitShape,
    teacher_hidden_ND: Tensor,
    teacher_head: nn.Module,
    teacher_shape: LogitShape,
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Divergence of each token's two distributions, from hidden states, chunk by chunk and recomputed in backward."""

    def of_chunk(hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
        student = shaped_logits(head(hidden), shape, 1.0)
        with torch.no_grad():
            teacher = shaped_logits(teacher_head(teacher_hidden), teacher_shape, 1.0)
        return divergence(student, teacher)

    # Several fp32 matrices of a chunk are alive at once here.
    size = max(1, chunk_tokens(head.out_features, hidden_ND.device) // 4)
    pairs = zip(hidden_ND.split(size), teacher_hidden_ND.split(size))
    return torch.cat([checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in pairs])


def _from_module(hidden, head, targets, shape, temperature):
    log_probs = shaped_logits(head(hidden), shape, temperature).log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], entropies


def raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 result; on CUDA also for half-precision operands, without rounding the logits first."""
    if hidden.is_meta:  # stands for an accelerator (train/plan); not every torch knows the product below on it
        raw = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    elif hidden.is_cuda and hidden.dtype != torch.float32:
        raw = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        raw = torch.mm(hidden, weight.t()).float()
    return raw if bias is None else raw.add_(bias)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, shape, temperature, entropy, chunk):
        count = hidden.shape[0]
        log_probs = hidden.new_empty(count, dtype=torch.float32)
        normalisers = torch.empty_like(log_probs)
        means = torch.empty_like(log_probs) if entropy else None  # E[z], for the entropy and its gradient
        for begin in range(0, count, chunk):
            part = slice(begin, begin + chunk)
            logits = shaped_logits(raw_logits(hidden[part], weight, bias), shape, temperature)
            normalisers[part] = torch.logsumexp(logits, -1)
            log_probs[part] = logits.gather(-1, targets[part, None])[:, 0] - normalisers[part]
            if means is not None:
                p = torch.exp(logits - normalisers[part, None])
                means[part] = (p * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, means)
        ctx.settings = shape, temperature, chunk
        return log_probs, normalisers if means is None else normalisers - means

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, targets, normalisers, means = ctx.saved_tensors
        shape, temperature, chunk = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for begin in range(0, hidden.shape[0], chunk):
            part = slice(begin, begin + chunk)
            logits = shaped_logits(raw_logits(hidden[part], weight, bias), shape, temperature)
            slope = None
            if shape.softcap is not None:  # d cap(z) / dz = 1 - tanh^2
                slope = 1 - (logits * (temperature / shape.softcap)).square()
            centred = logits - means[part, None] if means is not None else None
            grad = logits.sub_(normalisers[part, None]).exp_()  # the probabilities
            if centred is None:
                grad.mul_(-grad_log_probs[part, None])
            else:
                grad.mul_(-(grad_log_probs[part, None] + grad_entropy[part, None] * centred))
            grad.scatter_add_(1, targets[part, None], grad_log_probs[part, None])
            if shape.scale != temperature:
                grad.mul_(shape.scale / temperature)
            if slope is not None:
                grad.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.t(), hidden[part])
                else:
                    grad_weight += grad.t() @ hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None
