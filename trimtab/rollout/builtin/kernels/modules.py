"""Kernels in place of modules of transformers while the engine generates: RMS norms, projections of the same input,
gated MLPs and stacked experts.

A norm is five to nine operations, experts with their sorting about twenty, and between small operations a device waits.
Families multiply a norm by the weight before or after rounding, by 1 + weight, or by a gate as well. Which a class does
is found by trying it with random numbers, as is whether a class of MLPs or experts does what the kernels do; one that
does something else keeps its own forward.
"""

import contextlib
import copy
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from trimtab.models.fused_layer import Experts
from trimtab.models.layer_kernels import gated, warps_of_norm
from trimtab.models.pretrained import first_line
from trimtab.models.recurrent_kernels import relative_gap
from trimtab.rollout.builtin.kernels.fused_linear import (
    few_rows_apply,
    has_few_rows,
    is_plain,
    small_batch_gate_up,
    small_batch_linears,
)

logger = logging.getLogger(__name__)

ROUNDED_FIRST, ROUNDED_LAST, ONE_ADDED = range(3)
WIDEST = 16_384
TRIED = 5  # rows


@triton.jit
def _norm(
    states, weight, gate, out, row, gate_row, epsilon,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < WIDTH
    x = tl.load(states + number * row + column, inside, 0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    w = tl.load(weight + column, inside, 0.0)
    if KIND == 0:
        x = (w * x.to(out.dtype.element_ty)).to(out.dtype.element_ty).to(tl.float32)
    elif KIND == 1:
        x = w.to(tl.float32) * x
    else:
        x = (1.0 + w.to(tl.float32)) * x
    if GATED:
        g = tl.load(gate + number * gate_row + column, inside, 0.0).to(tl.float32)
        x = x * (g * tl.sigmoid(g))
    tl.store(out + number * WIDTH + column, x.to(out.dtype.element_ty), inside)


def rms_norm(states: Tensor, weight_D: Tensor, epsilon: float, kind: int, gate: Tensor | None = None) -> Tensor:
    """Of the last dimension; `gate`, of the same shape: the result is multiplied by its SiLU."""
    rows_RD = states.reshape(-1, states.shape[-1])
    gate_RD = rows_RD if gate is None else gate.reshape(rows_RD.shape)
    if rows_RD.stride(1) != 1 or gate_RD.stride(1) != 1:
        rows_RD, gate_RD = rows_RD.contiguous(), gate_RD.contiguous()
    out_RD = torch.empty(rows_RD.shape, dtype=states.dtype, device=states.device)
    rows, width = rows_RD.shape
    if rows:
        _norm[(rows,)](
            rows_RD, weight_D, gate_RD, out_RD, rows_RD.stride(0), gate_RD.stride(0), epsilon,
            WIDTH=width, COLUMNS=triton.next_power_of_2(width), KIND=kind, GATED=gate is not None,
            num_warps=warps_of_norm(width),
        )  # fmt: skip
    return out_RD.view(states.shape)


# ---- in place of modules


@contextlib.contextmanager
def fused_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, kernels do what norms, MLPs, experts and projections among these do."""
    replaced: list[nn.Module] = []
    for module in modules:
        for projections in _projections_of(module):
            joined = JoinedLinears(projections)
            for index, projection in enumerate(projections):
                projection.forward = functools.partial(joined, index)
            replaced += projections
        if "forward" in vars(module):
            continue
        if (epsilon := _epsilon(module)) is not None:
            module.forward = functools.partial(_norm_forward, module, epsilon)
        elif _is_gated_mlp(module):
            module.forward = functools.partial(_mlp_forward, module)
        elif _has_stacked_experts(module):
            module.forward = functools.partial(_experts_forward, module)
        else:
            continue
        replaced.append(module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


@functools.cache
def _arguments(forward: Callable[..., Tensor]) -> list[str]:
    """Of a module, after itself."""
    return list(inspect.signature(forward).parameters)[1:]


def _epsilon(module: nn.Module) -> float | None:
    """Of an RMS norm whose forward takes hidden states, and perhaps a gate; None for other modules."""
    kind = type(module)
    if "RMSNorm" not in kind.__name__ or set(module._parameters) != {"weight"} or module._modules:
        return None
    weight, asked = module._parameters["weight"], _arguments(kind.forward)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.ndim != 1 or len(weight) > WIDEST or not isinstance(epsilon, float):
        return None
    return epsilon if len(asked) == 1 or asked[1:] == ["gate"] else None


def _norm_forward(module: nn.Module, epsilon: float, *given: Tensor, **named: Tensor) -> Tensor:
    weight, states = module.weight, given[0] if given else module.weight
    alike = all(own.shape == states.shape and own.dtype == weight.dtype for own in given)
    if given and alike and not named and states.shape[-1] == len(weight):
        asked = (type(module), len(weight), states.dtype, states.device, epsilon, len(given))
        if asked not in _kinds:
            _kinds[asked] = _kind_of_norm(module, epsilon, *given)
        if (kind := _kinds[asked]) is not None:
            return rms_norm(states, weight, epsilon, kind, *given[1:])
    return type(module).forward(module, *given, **named)


_kinds: dict[tuple, int | None] = {}
"""What a class of norms does, by class and shape; None: something else."""


@torch.no_grad()
def _kind_of_norm(module: nn.Module, epsilon: float, *given: Tensor) -> int | None:
    like, width = given[0], given[0].shape[-1]
    random = torch.Generator(like.device).manual_seed(0)
    sizes = [(rows, width) for rows in (1, *[TRIED] * len(given))]
    weight, *drawn = (torch.randn(size, generator=random, device=like.device).to(like.dtype) for size in sizes)
    stand_in = copy.copy(module)
    stand_in.__dict__["_parameters"] = {"weight": nn.Parameter(weight[0], requires_grad=False)}
    expected = type(module).forward(stand_in, *drawn).float()
    gaps = {
        kind: _gap(lambda: rms_norm(drawn[0], weight[0], epsilon, kind, *drawn[1:]), expected)  # noqa: B023
        for kind in (ROUNDED_FIRST, ROUNDED_LAST, ONE_ADDED)
    }
    best = min(gaps, key=lambda kind: gaps[kind])
    return best if gaps[best] <= (1e-5 if like.dtype == torch.float32 else 5e-3) else None


def _gap(work: Callable[[], Tensor], expected: Tensor) -> float:
    """How far a kernel's result is from the module's, relative to its size; infinite if the kernel fails."""
    try:
        return relative_gap(expected, work())
    except triton.TritonError as error:
        logger.warning("modules have no kernel here and are slower: %s", first_line(error))
        return math.inf


SAME_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Names of Linear modules that are called one after another with the same tensor, which nothing changes in between."""


def _projections_of(module: nn.Module) -> Iterator[list[nn.Linear]]:
    for names in SAME_INPUT:
        given = [module._modules.get(name) for name in names]
        found = [
            own for own in given if type(own) is nn.Linear and own.out_features % 16 == 0 and "forward" not in vars(own)
        ]
        if len(found) > 1 and len({(own.in_features, own.bias is None) for own in found}) == 1:
            yield found


class JoinedLinears:
    """With few rows, the first of these modules that is called computes the outputs of all."""

    def __init__(self, modules: list[nn.Linear]):
        self.modules = modules
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}  # of the modules that have not been called with this input yet

    def __call__(self, index: int, states: Tensor) -> Tensor:
        if states is not self._input or index not in self._outputs:
            if not self._applies(states):
                return nn.Linear.forward(self.modules[index], states)
            found = small_batch_linears(states.flatten(0, -2), self.modules)
            self._input = states
            self._outputs = {i: output.view(*states.shape[:-1], -1) for i, output in enumerate(found)}
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output

    def _applies(self, states: Tensor) -> bool:
        rows_TD, first = states.flatten(0, -2), self.modules[0]
        if not has_few_rows(rows_TD) or not all(is_plain(module, rows_TD) for module in self.modules):
            return False
        widths = tuple(module.out_features for module in self.modules)
        asked = (JoinedLinears, widths, first.in_features, first.bias is None, states.dtype, states.device)
        if asked not in _known:
            _known[asked] = _does_the_same(self._one_by_one, self._together, first, rows_TD)
        return _known[asked]

    def _one_by_one(self, _: nn.Module, rows_TD: Tensor) -> Tensor:
        return torch.cat([nn.Linear.forward(module, rows_TD) for module in self.modules], 1)

    def _together(self, _: nn.Module, rows_TD: Tensor) -> Tensor:
        return torch.cat(small_batch_linears(rows_TD, self.modules), 1)


MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def _is_gated_mlp(module: nn.Module) -> bool:
    """Whether its forward uses three projections and an activation, and nothing else."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and set(code.co_names) == MLP and code.co_argcount == 2 and not module._parameters


def _mlp_forward(module: nn.Module, states: Tensor) -> Tensor:
    sizes = module.gate_proj.in_features, module.gate_proj.out_features
    asked = (type(module), type(module.act_fn), sizes, states.dtype, states.device)
    if asked not in _known:
        _known[asked] = _does_the_same(type(module).forward, _gated_mlp, module, states)
    return (_gated_mlp if _known[asked] else type(module).forward)(module, states)


def _gated_mlp(module: nn.Module, states: Tensor) -> Tensor:
    rows_TD, both = states.flatten(0, -2), [module.gate_proj, module.up_proj]
    if few_rows_apply(rows_TD, both) and both[0].bias is None:
        inside = small_batch_gate_up(rows_TD, *both)
    else:
        inside = gated(*(projection(rows_TD) for projection in both))
    return module.down_proj(inside).view(states.shape)


_known: dict[tuple, bool] = {}
"""Whether the kernels do what a class of projections, MLPs or experts does, by class and shape."""


@torch.no_grad()
def _does_the_same(forward: Callable, kernels: Callable, module: nn.Module, like: Tensor, *choices: Tensor) -> bool:
    """Tried with the module's own weights, and with numbers of any size: some modules clamp large ones."""
    random = torch.Generator(like.device).manual_seed(0)
    drawn = torch.randn(TRIED, like.shape[-1], generator=random, device=like.device)
    gaps = []
    for size in (1, 100):
        states = (drawn * size).to(like.dtype)
        expected = forward(module, states, *choices)
        gaps.append(_gap(lambda: kernels(module, states, *choices), expected))  # noqa: B023
    return max(gaps) <= (1e-4 if like.dtype == torch.float32 else 2e-2)


def _has_stacked_experts(module: nn.Module) -> bool:
    if set(module._parameters) != {"gate_up_proj", "down_proj"} or module._buffers:
        return False
    both, down = module.gate_up_proj, module.down_proj
    return (
        _arguments(type(module).forward) == ["hidden_states", "top_k_index", "top_k_weights"]
        and both is not None
        and both.ndim == down.ndim == 3
        and both.shape[0] == down.shape[0] == getattr(module, "num_experts", None)  # others have some without weights
        and both.shape[2] == down.shape[1]
        and both.shape[1] == 2 * down.shape[2]
    )


def _experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    both, down = module.gate_up_proj, module.down_proj
    given = hidden_states, top_k_index, top_k_weights
    plain = hidden_states.ndim == top_k_index.ndim == 2 and hidden_states.stride(1) == 1 and not torch.is_grad_enabled()
    if plain and both.dtype == down.dtype == hidden_states.dtype and both.is_contiguous() and down.is_contiguous():
        asked = (type(module), both.shape, hidden_states.dtype, hidden_states.device, top_k_index.shape[1])
        if asked not in _known:
            random = torch.Generator(both.device).manual_seed(1)
            shares = torch.rand(TRIED, len(both), generator=random, device=both.device)
            weights, chosen = shares.topk(top_k_index.shape[1])
            choices = chosen, weights.to(top_k_weights.dtype)
            _known[asked] = _does_the_same(type(module).forward, _experts, module, hidden_states, *choices)
        if _known[asked]:
            return _experts(module, *given)
    return type(module).forward(module, *given)


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    chosen = top_k_weights.contiguous(), top_k_index.contiguous()
    return Experts.apply(hidden_states, *chosen, module.gate_up_proj, module.down_proj)
