"""Triton kernels of the LM head: log-softmax of targets, entropy and gradient of logits, each one pass over a chunk.
The engine samples with the same sums (rollout/builtin/kernels/decode_step.py).

Forward: log Z, the target's logit and, if requested, E[z] of every row. Backward: the gradient of the raw logits, in
the dtype of the next matrix products. models/lm_head.py has the formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 2048  # logits that one program reads
TURNED = (2048, 8)  # columns and warps of a program, tuned on an H200
OF_ROWS = ["places", "normalisers", "chosen", "means", "grad_log_probs", "grad_chosen", "grad_entropy"]
OF_STRETCHES = ["peaks", "sums", "mixes"]
"""Arguments with few values for each row: parts of other tensors, so that their alignment depends on the number of
rows. Nothing is compiled anew because of it, and the order of sums does not depend on it."""


@triton.jit
def shaped(raw, scale, softcap, temperature, SHAPED: tl.constexpr, CAPPED: tl.constexpr):
    z = raw
    if SHAPED:
        z = raw * scale
        if CAPPED:
            z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
        z = z / temperature
    return z


@triton.jit(do_not_specialize_on_alignment=OF_STRETCHES)
def _stretches(
    raw, peaks, sums, mixes, vocabulary, row_stride, scale, softcap, temperature, heat_stride,
    SHAPED: tl.constexpr, CAPPED: tl.constexpr, MEANS: tl.constexpr, BY_ROW: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if BY_ROW:
        temperature = tl.load(temperature + row * heat_stride)
    word = stretch * STRETCH + tl.arange(0, STRETCH)
    inside = word < vocabulary
    z = shaped(tl.load(raw + row * row_stride + word, inside, 0.0), scale, softcap, temperature, SHAPED, CAPPED)
    z = tl.where(inside, z, float("-inf"))
    peak = tl.max(z, 0)
    # A NaN must reach the result: max() may ignore it, the sum does not. A stretch may be all minus infinity.
    weight = tl.where(z == float("-inf"), 0.0, tl.exp(z - peak))
    place = row * tl.num_programs(1) + stretch
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(weight, 0))
    if MEANS:
        tl.store(mixes + place, tl.sum(weight * tl.where(z == float("-inf"), 0.0, z), 0))


@triton.jit
def joined(peaks, sums, row, COUNT: tl.constexpr, COUNT_ROUNDED: tl.constexpr):
    """The highest logit of a row, and the weight of each stretch relative to it."""
    stretch = tl.arange(0, COUNT_ROUNDED)
    inside = stretch < COUNT
    peak = tl.load(peaks + row * COUNT + stretch, inside, float("-inf"))
    top = tl.max(peak, 0)
    return top, tl.where(inside, tl.load(sums + row * COUNT + stretch, inside, 0.0) * tl.exp(peak - top), 0.0)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS + OF_STRETCHES)
def _read(
    raw, places, peaks, sums, mixes, normalisers, chosen, means, row_stride, scale, softcap, temperature, heat_stride,
    SHAPED: tl.constexpr, CAPPED: tl.constexpr, MEANS: tl.constexpr, BY_ROW: tl.constexpr,
    COUNT: tl.constexpr, COUNT_ROUNDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if BY_ROW:
        temperature = tl.load(temperature + row * heat_stride)
    top, weight = joined(peaks, sums, row, COUNT, COUNT_ROUNDED)
    whole = tl.sum(weight, 0)
    tl.store(normalisers + row, top + tl.log(whole))
    if MEANS:
        _, mixed = joined(peaks, mixes, row, COUNT, COUNT_ROUNDED)
        tl.store(means + row, tl.sum(mixed, 0) / whole)
    target = tl.load(raw + row * row_stride + tl.load(places + row))
    tl.store(chosen + row, shaped(target, scale, softcap, temperature, SHAPED, CAPPED))


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _turned(
    raw, out, places, normalisers, means, grad_log_probs, grad_chosen, grad_entropy, vocabulary, row_stride, blocks,
    scale, softcap, temperature,
    SHAPED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    word = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = word < vocabulary
    begin = row.to(tl.int64) * row_stride
    z = shaped(tl.load(raw + begin + word, inside, 0.0), scale, softcap, temperature, SHAPED, CAPPED)
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


def stretches(
    raw_NV: Tensor, scale: float, softcap: float | None, temperature: float | Tensor, *, means: bool = False
) -> tuple[Tensor, tuple, dict[str, bool]]:
    """Of each stretch of every row the highest logit, the sum of exp(z - highest) and, with `means`, of z exp(z -
    highest) [3, rows, stretches]; and how logits are shaped, for kernels that go on: arguments, and compile-time
    switches."""
    rows, vocabulary = raw_NV.shape
    assert raw_NV.stride(1) == 1
    count = triton.cdiv(vocabulary, STRETCH)
    found_3NS = torch.empty(3, rows, count, dtype=torch.float32, device=raw_NV.device)
    by_row = isinstance(temperature, Tensor)
    heat = (temperature, temperature.stride(0)) if isinstance(temperature, Tensor) else (float(temperature), 0)
    shape = float(scale), float(softcap or 0.0), *heat
    switches = _switches(scale, softcap, None if by_row else temperature) | {"BY_ROW": by_row}
    _stretches[rows, count](
        raw_NV, *found_3NS, vocabulary, raw_NV.stride(0), *shape, **switches, MEANS=means, STRETCH=STRETCH, num_warps=4
    )
    counts = {"COUNT": count, "COUNT_ROUNDED": triton.next_power_of_2(count)}
    return found_3NS, shape, switches | counts


def read_logits(
    raw_NV: Tensor, places_N: Tensor, scale: float, softcap: float | None, temperature: float | Tensor, *, means: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The shaped logit of every row's target, log Z and, with `means`, E[z]. `temperature`: of all rows, or of each."""
    found_3NS, shape, switches = stretches(raw_NV, scale, softcap, temperature, means=means)
    chosen_N, normalisers_N = torch.empty(2, len(raw_NV), dtype=torch.float32, device=raw_NV.device)
    means_N = torch.empty_like(chosen_N) if means else None
    _read[len(raw_NV),](
        raw_NV, places_N.contiguous(), *found_3NS, normalisers_N, chosen_N, chosen_N if means_N is None else means_N,
        raw_NV.stride(0), *shape, **switches, MEANS=means, num_warps=4,
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


def _switches(scale: float, softcap: float | None, temperature: float | None) -> dict[str, bool]:
    shaped = scale != 1.0 or softcap is not None or temperature != 1.0
    return {"SHAPED": shaped, "CAPPED": softcap is not None}
