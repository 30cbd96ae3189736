"""Log-probabilities (and entropies) of target tokens from hidden states, without holding [tokens, vocabulary].

    log p(y | h) = z_y - logsumexp(z),      z = cap(scale * (W h + b)) / temperature,   cap(z) = c tanh(z / c)

Tokens are processed in chunks. The forward pass saves one number per token (the logsumexp; two with entropy); the
backward pass recomputes a chunk's logits, on a CPU only those beyond the first KEPT logits. Granite, Cohere and Gemma-2
have a `scale` or `c`; other families have neither. Everything after the matrix product is fp32. With Triton, the work
after the product is one pass over the chunk in each direction (lm_head_kernels.py).

With a head split by vocabulary (parallel/tensor_parallel), each process computes the logits of its own part of the
vocabulary, also in chunks. After all chunks they exchange two numbers per token (three with entropy); over processes r

    log Z = logsumexp_r(log Z_r),      E[z] = sum_r exp(log Z_r - log Z) E_r[z]

and in the backward pass the gradient of the hidden states. Logits are never gathered for log-probs and entropies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.distributed.device import has_kernels, kind_of
from trimtab.distributed.fsdp import local
from trimtab.distributed.process_group import all_gather, all_reduce, group_copy, group_gather, group_reduce
from trimtab.models.fused_layer import linear
from trimtab.models.parallel.tensor_parallel import VocabShard

KEPT = 2**26  # logits (256 MiB) that a CPU saves for the backward pass instead of recomputing them


@dataclass(frozen=True)
class LogitShape:
    """Scale and soft cap that a model applies to W h + b before the softmax."""

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


def shaped_logits(raw: Tensor, shape: LogitShape, temperature: float | Tensor) -> Tensor:
    """`temperature`: of all rows, or of each."""
    logits = raw.float()
    if shape.scale != 1.0:
        logits = logits * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    if isinstance(temperature, Tensor):
        return logits / temperature[:, None]
    return logits if temperature == 1.0 else logits / temperature


def read_logits(
    raw: Tensor, places_N: Tensor, shape: LogitShape, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The targets' logits, log Z and, for entropies, E[z] of a chunk."""
    if raw.is_meta:
        chosen_N, normalisers_N, means_N = raw.new_empty(3, len(raw))
        return chosen_N, normalisers_N, means_N if entropy else None
    if has_kernels(raw.device):
        from trimtab.models import lm_head_kernels

        return lm_head_kernels.read_logits(raw, places_N, shape.scale, shape.softcap, temperature, means=entropy)
    logits = shaped_logits(raw, shape, temperature)
    normalisers_N = torch.logsumexp(logits, -1)
    chosen_N = logits.gather(-1, places_N[:, None])[:, 0]
    if not entropy:
        return chosen_N, normalisers_N, None
    p = torch.exp(logits - normalisers_N[:, None])
    return chosen_N, normalisers_N, (p * logits).sum(-1)


class LogitRows(NamedTuple):
    """Inputs of the gradient of rows of logits."""

    places: Tensor  # indices of the targets in this process's part of the vocabulary
    normalisers: Tensor
    means: Tensor | None  # E[z], for entropies
    grad_log_probs: Tensor
    grad_chosen: Tensor  # grad_log_probs, or 0 if the target is in another process's part
    grad_entropy: Tensor

    def at(self, part: slice) -> "LogitRows":
        return LogitRows(*(None if column is None else column[part] for column in self))


def logit_gradient(
    raw: Tensor, rows: LogitRows, shape: LogitShape, temperature: float, dtype: torch.dtype, grad_bias: Tensor | None
) -> Tensor:
    """Gradient of a chunk's raw logits, in the dtype of the weights; its sum is added to `grad_bias`."""
    if raw.is_meta:
        return torch.empty_like(raw, dtype=dtype)
    if has_kernels(raw.device):
        from trimtab.models import lm_head_kernels

        grad = lm_head_kernels.logit_gradient(raw, *rows, shape.scale, shape.softcap, temperature, dtype)
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
    """fp32 log-prob of every target and, if requested, the entropy of every prediction."""
    if type(head) is nn.Linear:
        shard = VocabShard.of(head.weight)
        weight, bias = _matrix(head)
        size = chunk or chunk_tokens(weight.shape[0], hidden_ND.device, alone=True)
        log_probs, entropies = _ChunkedLogProbs.apply(
            hidden_ND, weight, bias, targets_N, shard, shape, temperature, entropy, size
        )
        return log_probs, entropies if entropy else None

    def from_module(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = shaped_logits(head(hidden), shape, temperature).log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, targets[:, None])[:, 0], entropies

    # A head that is more than one matrix (for example with LoRA): call the module, chunk by chunk.
    size = chunk or chunk_tokens(head.out_features, hidden_ND.device)
    chunks = zip(hidden_ND.split(size), targets_N.split(size))
    pieces = [checkpoint(from_module, h, y, use_reentrant=False) for h, y in chunks]
    log_probs, entropies = (torch.cat(p) for p in zip(*pieces))
    return log_probs, entropies if entropy else None


def chunk_tokens(vocabulary: int, device: torch.device, *, alone: bool = False) -> int:
    """Tokens per chunk: its fp32 logits take 16 MiB on a CPU, 512 MiB on an accelerator, and 1 GiB if `alone` with
    fused kernels, which need no second matrix of that size (larger chunks are no faster on an H200). A meta device
    represents an accelerator in plans."""
    if device.type == "cpu":
        return max(1, 2**22 // vocabulary)
    fused = alone and (device.type == "meta" or has_kernels(device))
    return max(1, (2**28 if fused else 2**27) // vocabulary)


def choice_log_probs(hidden_ND: Tensor, head: nn.Module, choices_K: Tensor, shape: LogitShape) -> Tensor:
    """Log-probs over only the tokens `choices_K` [N, K]; with a plain head, only their rows are multiplied."""
    if type(head) is not nn.Linear:  # for example with LoRA
        return shaped_logits(head(hidden_ND)[:, choices_K], shape, 1.0).log_softmax(-1)
    shard, (weight, bias) = VocabShard.of(head.weight), _matrix(head)
    if shard is None:
        raw = nn.functional.linear(hidden_ND, weight[choices_K], None if bias is None else bias[choices_K])
    else:
        places_K, here_K = shard.places(choices_K)
        rows, added = weight[places_K], None if bias is None else bias[places_K]
        raw = group_reduce(nn.functional.linear(group_copy(hidden_ND, shard.group), rows, added) * here_K, shard.group)
    return shaped_logits(raw, shape, 1.0).log_softmax(-1)


def token_divergence(
    hidden_ND: Tensor,
    head: nn.Module,
    shape: LogitShape,
    teacher_hidden_ND: Tensor,
    teacher_head: Callable[[Tensor], Tensor],
    teacher_shape: LogitShape,
    divergence: Callable[[Tensor, Tensor], Tensor],
    temperature: float = 1.0,
) -> Tensor:
    """Divergence between student and teacher at each token, in chunks that are recomputed in the backward pass.

    A divergence is any function of both distributions, so the logits of a split head are gathered chunk by chunk. Heads
    of one tokenizer may be padded to different sizes: the distributions are over the tokens that both have.
    """

    def of_chunk(hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
        student = shaped_logits(head(hidden), shape, temperature)
        with torch.no_grad():
            teacher = shaped_logits(teacher_head(teacher_hidden), teacher_shape, temperature)
        common = min(student.shape[-1], teacher.shape[-1])
        return divergence(student[:, :common], teacher[:, :common])

    # Smaller chunks, since several fp32 matrices of a chunk are alive at once.
    size = max(1, chunk_tokens(head.out_features, hidden_ND.device) // 4)
    pairs = zip(hidden_ND.split(size), teacher_hidden_ND.split(size))
    return torch.cat([checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in pairs])


def whole_logits(hidden_ND: Tensor, head: nn.Module) -> Tensor:
    """Logits of the whole vocabulary, gathered from a split head, for sampling."""
    if type(head) is not nn.Linear:
        return head(hidden_ND)
    shard, (weight, bias) = VocabShard.of(head.weight), _matrix(head)
    raw = raw_logits(hidden_ND, weight, bias)
    return raw if shard is None else group_gather(raw, shard.group, shard.widths)


def _matrix(head: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of this process's part of the vocabulary."""
    return local(head.weight), None if head.bias is None else local(head.bias)


def raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 logits; if the device has such products, half-precision inputs are not rounded to half precision in
    between."""
    if hidden.is_meta:  # an accelerator in plans; not every torch has the product below on meta tensors
        raw = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    elif kind_of(hidden.device).wide_products and hidden.dtype != torch.float32:
        raw = linear(hidden, weight, None, torch.float32)
    else:
        raw = torch.mm(hidden, weight.t()).float()
    return raw if bias is None else raw.add_(bias)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to an fp32 sum; if the device supports it, without rounding the product first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif kind_of(total.device).wide_products:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, shard, shape, temperature, entropy, chunk):
        """`shard`: this process's part of the vocabulary; None: all of it."""
        count = hidden.shape[0]
        places, here = (targets, None) if shard is None else shard.places(targets)
        chosen = hidden.new_empty(count, dtype=torch.float32)  # the targets' logits
        normalisers = torch.empty_like(chosen)
        means = torch.empty_like(chosen) if entropy else None  # E[z], for the entropy and its gradient
        kept: dict[int, Tensor] = {}
        room = KEPT if hidden.device.type == "cpu" and any(ctx.needs_input_grad[:3]) else 0
        for begin in range(0, count, chunk):
            part = slice(begin, begin + chunk)
            raw = raw_logits(hidden[part], weight, bias)
            chosen[part], normalisers[part], found = read_logits(raw, places[part], shape, temperature, entropy)
            if means is not None:
                means[part] = found
            if raw.numel() <= room:
                kept[begin] = raw
                room -= raw.numel()
            del raw  # free it before the next chunk's logits are computed
        if shard is not None:
            chosen, normalisers, means = _of_all_words(chosen * here, normalisers, means, shard)
        ctx.save_for_backward(hidden, weight, bias, places, here, normalisers, means)
        ctx.settings, ctx.kept = (shard, shape, temperature, chunk), kept
        return chosen - normalisers, normalisers if means is None else normalisers - means

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, places, here, normalisers, means = ctx.saved_tensors
        shard, shape, temperature, chunk = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        grad_chosen = grad_log_probs if here is None else grad_log_probs * here
        rows = LogitRows(places, normalisers, means, grad_log_probs, grad_chosen, grad_entropy)
        for begin in range(0, hidden.shape[0], chunk):
            part = slice(begin, begin + chunk)
            raw = ctx.kept.pop(begin, None)  # overwritten by its gradient
            if raw is None:
                raw = raw_logits(hidden[part], weight, bias)
            grad = logit_gradient(raw, rows.at(part), shape, temperature, weight.dtype, grad_bias)
            del raw
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[part])
            del grad
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        if grad_hidden is not None and shard is not None:
            all_reduce(grad_hidden, shard.group)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _of_all_words(
    chosen_N: Tensor, normalisers_N: Tensor, means_N: Tensor | None, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combine the targets' logits, log Z and E[z] of all processes."""
    own = [chosen_N, normalisers_N] + ([] if means_N is None else [means_N])
    of_each = all_gather(torch.stack(own), shard.group)  # [processes, 2 or 3, N]
    normalisers_RN = of_each[:, 1]
    whole_N = normalisers_RN.logsumexp(0)
    if means_N is not None:
        means_N = ((normalisers_RN - whole_N).exp() * of_each[:, 2]).sum(0)
    return of_each[:, 0].sum(0), whole_N, means_N
