"""A chunk of logits: what a model does to them, what log-probs need of them, and their gradient. All of it in fp32.

    z = cap(scale * raw) / temperature,   cap(z) = c tanh(z / c)

Where Triton's kernels run, each is one pass over the chunk (kernels/head.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.distributed.device import has_kernels


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


def fuses(device: torch.device) -> bool:
    """Whether there are kernels. A tensor without contents stands for one on an accelerator (plan)."""
    return device.type == "meta" or has_kernels(device)


def shaped_logits(raw: Tensor, shape: LogitShape, temperature: float) -> Tensor:
    logits = raw.float()
    if shape.scale != 1.0:
        logits = logits * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return logits if temperature == 1.0 else logits / temperature


def read_logits(
    raw: Tensor, places_N: Tensor, shape: LogitShape, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of a chunk: the logits of the targets, log Z and, for entropies, E[z]."""
    if raw.is_meta:
        chosen_N, normalisers_N, means_N = raw.new_empty(3, len(raw))
        return chosen_N, normalisers_N, means_N if entropy else None
    if has_kernels(raw.device):
        from trimtab.models.kernels import head

        return head.read_logits(raw, places_N, shape.scale, shape.softcap, temperature, means=entropy)
    logits = shaped_logits(raw, shape, temperature)
    normalisers_N = torch.logsumexp(logits, -1)
    chosen_N = logits.gather(-1, places_N[:, None])[:, 0]
    if not entropy:
        return chosen_N, normalisers_N, None
    p = torch.exp(logits - normalisers_N[:, None])
    return chosen_N, normalisers_N, (p * logits).sum(-1)


class LogitRows(NamedTuple):
    """What the gradient of a row of logits is made of."""

    places: Tensor  # of the targets, among the words that are here
    normalisers: Tensor
    means: Tensor | None  # E[z], for entropies
    grad_log_probs: Tensor
    grad_chosen: Tensor  # the same; 0 where the target is not here
    grad_entropy: Tensor

    def at(self, part: slice) -> "LogitRows":
        return LogitRows(*(None if column is None else column[part] for column in self))


def logit_gradient(
    raw: Tensor, rows: LogitRows, shape: LogitShape, temperature: float, dtype: torch.dtype, grad_bias: Tensor | None
) -> Tensor:
    """Of a chunk's raw logits, in the dtype of the weights; the bias's share is added to its own."""
    if raw.is_meta:
        return torch.empty_like(raw, dtype=dtype)
    if has_kernels(raw.device):
        from trimtab.models.kernels import head

        grad = head.logit_gradient(raw, *rows, shape.scale, shape.softcap, temperature, dtype)
        if grad_bias is not None:
            grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        return grad
    logits = shaped_logits(raw, shape, temperature)
    slope = None
    if shape.softcap is not None:  # d cap(z) / dz = 1 - tanh^2
        slope = 1 - (logits * (temperature / shape.softcap)).square()
    centred = logits - rows.means[:, None] if rows.means is not None else None
    grad = logits.sub_(rows.normalisers[:, None]).exp_()  # the probabilities
    if centred is None:
        grad.mul_(-rows.grad_log_probs[:, None])
    else:
        grad.mul_(-(rows.grad_log_probs[:, None] + rows.grad_entropy[:, None] * centred))
    grad.scatter_add_(1, rows.places[:, None], rows.grad_chosen[:, None])
    if shape.scale != temperature:
        grad.mul_(shape.scale / temperature)
    if slope is not None:
        grad.mul_(slope)
    if grad_bias is not None:
        grad_bias += grad.sum(0)
    return grad.to(dtype)
