"""Triton kernels of the LM head: log-softmax of targets, entropy and gradient of logits, each one pass over a chunk.

Forward: log Z, the target's logit and, if requested, E[z] of every row. Backward: the gradient of the raw logits, in
the dtype of the next matrix products. models/lm_head.py has the formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = -3.0e38  # finite, so that subtracting minus infinity gives no NaN
# (columns per iteration, warps) of a program, tuned on an H200.
READ = (1024, 8)
TURNED = (2048, 8)


@triton.jit
def _shaped(raw, scale, softcap, temperature, SHAPED: tl.constexpr, CAPPED: tl.constexpr):
    z = raw
    if SHAPED:
        z = raw * scale
        if CAPPED:
            z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
        z = z / temperature
    return z


@triton.jit
def _read(
    raw, places, normalisers, chosen, means, vocabulary, row_stride, scale, softcap, temperature,
    SHAPED: tl.constexpr, CAPPED: tl.constexpr, MEANS: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin = raw + row.to(tl.int64) * row_stride
    # Every lane has its own running sum, so lanes exchange nothing before the end.
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        word = first + tl.arange(0, BLOCK)
        inside = word < vocabulary
        z = _shaped(tl.load(begin + word, inside, 0.0), scale, softcap, temperature, SHAPED, CAPPED)
        z = tl.where(inside, z, float("-inf"))
        # One exponential per logit: the factor of the larger of both is 1.
        weight = tl.exp(-tl.abs(z - peak))
        higher = z > peak
        total = tl.where(higher, total * weight + 1, total + weight)
        if MEANS:
            value = tl.where(inside, z, 0.0)
            mixed = tl.where(higher, mixed * weight + value, mixed + weight * value)
        peak = tl.maximum(peak, z)
    top = tl.max(peak, 0)
    share = tl.exp(peak - top)
    whole = tl.sum(total * share, 0)
    tl.store(normalisers + row, top + tl.log(whole))
    if MEANS:
        tl.store(means + row, tl.sum(mixed * share, 0) / whole)
    target = tl.load(begin + tl.load(places + row))
    tl.store(chosen + row, _shaped(target, scale, softcap, temperature, SHAPED, CAPPED))


@triton.jit
def _turned(
    raw, out, places, normalisers, means, grad_log_probs, grad_chosen, grad_entropy, vocabulary, row_stride, blocks,
    scale, softcap, temperature,
    SHAPED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    word = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = word < vocabulary
    begin = row.to(tl.int64) * row_stride
    z = _shaped(tl.load(raw + begin + word, inside, 0.0), scale, softcap, temperature, SHAPED, CAPPED)
    pull = tl.load(grad_log_probs + row)
    p = tl.exp(z - tl.load(normalisers + row))
    if ENTROPY:
        pull += tl.load(grad_entropy + row) * (z - tl.load(means + row))
    grad = -p * pull
    grad += tl.where(word == tl.load(places + row), tl.load(grad_chosen + row), 0.0)
    if SHAPED:
        grad *= scale / temperature
    if CAPPED:  # d cap(z) / dz = 1 - tanh^2
        bent = z * (temperature / softcap)
        grad *= 1 - bent * bent
    tl.store(out + begin + word, grad.to(out.dtype.element_ty), inside)


def read_logits(
    raw_NV: Tensor, places_N: Tensor, scale: float, softcap: float | None, temperature: float, *, means: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The shaped logit of every row's target, log Z and, with `means`, E[z]."""
    rows, vocabulary = raw_NV.shape
    assert raw_NV.stride(1) == 1
    chosen_N, normalisers_N = torch.empty(2, rows, dtype=torch.float32, device=raw_NV.device)
    means_N = torch.empty_like(chosen_N) if means else None
    block, warps = READ
    _read[rows,](
        raw_NV, places_N.contiguous(), normalisers_N, chosen_N, chosen_N if means_N is None else means_N,
        vocabulary, raw_NV.stride(0), float(scale), float(softcap or 0.0), float(temperature),
        **_switches(scale, softcap, temperature), MEANS=means, LOWEST=LOWEST,
        BLOCK=min(block, triton.next_power_of_2(vocabulary)), num_warps=warps,
    )  # fmt: skip
    return chosen_N, normalisers_N, means_N


def logit_gradient(
    raw_NV: Tensor, places_N: Tensor, normalisers_N: Tensor, means_N: Tensor | None,
    grad_log_probs_N: Tensor, grad_chosen_N: Tensor, grad_entropy_N: Tensor,
    scale: float, softcap: float | None, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Gradient of the raw logits. `grad_chosen_N`: of the log-probs, 0 for targets in another process's part."""
    rows, vocabulary = raw_NV.shape
    assert raw_NV.is_contiguous()
    out_NV = torch.empty_like(raw_NV, dtype=dtype)
    columns = [places_N, normalisers_N, normalisers_N if means_N is None else means_N]
    columns += [grad_log_probs_N, grad_chosen_N, grad_entropy_N]
    block, warps = TURNED
    block = min(block, triton.next_power_of_2(vocabulary))
    blocks = triton.cdiv(vocabulary, block)
    _turned[rows * blocks,](
        raw_NV, out_NV, *(column.contiguous() for column in columns),
        vocabulary, raw_NV.stride(0), blocks, float(scale), float(softcap or 0.0), float(temperature),
        **_switches(scale, softcap, temperature), ENTROPY=means_N is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out_NV


def _switches(scale: float, softcap: float | None, temperature: float) -> dict[str, bool]:
    shaped = scale != 1.0 or softcap is not None or temperature != 1.0
    return {"SHAPED": shaped, "CAPPED": softcap is not None}
