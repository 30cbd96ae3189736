"""Decode steps of recurrent layers: each state is read and written once, in place.

transformers has a function for each of these steps: the gated delta rule, also with a decay for every key (KDA),
Mamba-2, and the short convolution before them. Where no other package is installed, they are chains of operations; that
of the delta rule passes over the state about 13 times (50 MiB a sequence in Qwen3.5-4B). The kernels here take their
place one by one: a module's own forward runs with other functions of the same names (`step_forward`).

A function is replaced only where its kernel has agreed with it: at the first call with a shape both are run on a
random state, and compared up to rounding.
"""

import copy
import functools
import inspect
import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from trimtab.models.pretrained import first_line

logger = logging.getLogger(__name__)

MOST_TOGETHER = 64  # columns of a state in one program


class Inapplicable(Exception):
    """The kernel does not know such arguments."""


# ---- gated delta rule


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _delta_rule(
    query, key, value, decay, beta, rate, bias, state, out, scale, heads, group,
    query_row, query_head, query_column, key_row, key_head, key_column, value_row, value_head, value_column,
    decay_row, decay_head, decay_column, beta_row, beta_head,
    K: tl.constexpr, V: tl.constexpr, K_ROUNDED: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    GATES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    k, v = tl.arange(0, K_ROUNDED), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q_K = tl.load(query + row * query_row + head // group * query_head + k * query_column, k < K, 0.0).to(tl.float32)
    k_K = tl.load(key + row * key_row + head // group * key_head + k * key_column, k < K, 0.0).to(tl.float32)
    v_V = tl.load(value + row * value_row + head * value_head + v * value_column, v < V, 0.0).to(tl.float32)
    decay_K = tl.load(decay + row * decay_row + head * decay_head + k * decay_column, k < K, 0.0).to(tl.float32)
    beta_1 = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    if GATES:  # both are what the projections gave
        decay_K = _softplus(decay_K + tl.load(bias + head).to(tl.float32))
        decay_K *= -tl.exp(tl.load(rate + head).to(tl.float32))
        beta_1 = tl.sigmoid(beta_1).to(beta.dtype.element_ty).to(tl.float32)
    decay_K = tl.exp(decay_K)
    if NORM:
        q_K *= tl.rsqrt(tl.sum(q_K * q_K) + 1e-6)
        k_K *= tl.rsqrt(tl.sum(k_K * k_K) + 1e-6)
    kept = (k < K)[:, None] & (v < V)[None, :]
    own = state + pair * K * V + k[:, None] * V + v[None, :]
    state_KV = tl.load(own, kept, 0.0).to(tl.float32) * decay_K[:, None]
    change_V = (v_V - tl.sum(state_KV * k_K[:, None], 0)) * beta_1
    state_KV += k_K[:, None] * change_V[None, :]
    tl.store(own, state_KV, kept)
    tl.store(out + pair * V + v, tl.sum(state_KV * (q_K * scale)[:, None], 0), v < V)


def delta_rule_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """One token: query, key [S, 1, H, K], value [S, 1, H, V], beta [S, 1, H], g the same or [S, 1, H, K], and the state
    [S, H, K, V]."""
    if key.shape[1] != 1 or not output_final_state or query.shape != key.shape or value.shape[:3] != key.shape[:3]:
        raise Inapplicable
    return _updated(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel), initial_state


def _updated(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, norm: bool,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Queries and keys may have fewer heads. `gates`, A_log and dt_bias of each head: `decay` and `beta` are inputs of
    softplus and sigmoid."""
    (rows, _, heads, wide), width = value.shape, key.shape[3]
    if state is None or state.shape != (rows, heads, width, wide) or not state.is_contiguous() or heads % key.shape[2]:
        raise Inapplicable
    out, block = torch.empty_like(value, memory_format=torch.contiguous_format), _block(wide)
    _delta_rule[rows * heads, triton.cdiv(wide, block)](
        query, key, value, decay, beta, *(gates or (decay, beta)), state, out, width**-0.5, heads,
        heads // key.shape[2], *(x.stride(i) for x in (query, key, value) for i in (0, 2, 3)),
        decay.stride(0), decay.stride(2), decay.stride(3) if decay.dim() == 4 else 0, beta.stride(0), beta.stride(2),
        K=width, V=wide, K_ROUNDED=triton.next_power_of_2(width), BLOCK=block, NORM=norm, GATES=gates is not None,
        num_warps=4,
    )  # fmt: skip
    return out


# ---- Mamba-2


@triton.jit
def _selective_update(
    state, hidden, dt, a, b, c, d, bias, gate, out, heads, group,
    hidden_row, hidden_head, hidden_column, dt_row, dt_head, a_head, b_row, b_group, b_column, c_row, c_group, c_column,
    d_head, bias_head, gate_row, gate_head, gate_column,
    P: tl.constexpr, N: tl.constexpr, N_ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    p, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_ROUNDED)
    x_P = tl.load(hidden + row * hidden_row + head * hidden_head + p * hidden_column, p < P, 0.0).to(tl.float32)
    step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
    if BIAS:
        step += tl.load(bias + head * bias_head).to(tl.float32)
    if SOFTPLUS:
        step = _softplus(step)
    b_N = tl.load(b + row * b_row + (head // group) * b_group + n * b_column, n < N, 0.0).to(tl.float32)
    c_N = tl.load(c + row * c_row + (head // group) * c_group + n * c_column, n < N, 0.0).to(tl.float32)
    kept = (p < P)[:, None] & (n < N)[None, :]
    own = state + pair * P * N + p[:, None] * N + n[None, :]
    state_PN = tl.load(own, kept, 0.0).to(tl.float32) * tl.exp(step * tl.load(a + head * a_head).to(tl.float32))
    state_PN += x_P[:, None] * (step * b_N)[None, :]
    tl.store(own, state_PN, kept)
    out_P = tl.sum(state_PN * c_N[None, :], 1)
    if SKIP:
        out_P += x_P * tl.load(d + head * d_head).to(tl.float32)
    if GATE:
        z_P = tl.load(gate + row * gate_row + head * gate_head + p * gate_column, p < P, 0.0).to(tl.float32)
        out_P *= z_P / (1.0 + tl.exp(-z_P))
    tl.store(out + pair * P + p, out_P, p < P)


def selective_update_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """One token: state [S, H, P, N], hidden_states, dt, z [S, H, P], A [H, P, N], B, C [S, G, N], D, dt_bias [H, P].
    dt, A, D and dt_bias have one number for each head, expanded."""
    rows, heads, wide = hidden_states.shape
    groups, size = B.shape[1:]
    expanded = [dt.stride(2), A.stride(1), A.stride(2), *(x.stride(1) for x in (D, dt_bias) if x is not None)]
    if any(expanded) or not state.is_contiguous() or state.shape != (rows, heads, wide, size):
        raise Inapplicable
    out = torch.empty(rows, heads, wide, dtype=hidden_states.dtype, device=state.device)
    skip, bias, gate = (hidden_states if x is None else x for x in (D, dt_bias, z))  # without them, any tensor
    block = _block(wide)
    _selective_update[rows * heads, triton.cdiv(wide, block)](
        state, hidden_states, dt, A, B, C, skip, bias, gate, out, heads, heads // groups, *hidden_states.stride(),
        dt.stride(0), dt.stride(1), A.stride(0), *B.stride(), *C.stride(), skip.stride(0), bias.stride(0),
        *gate.stride(),
        P=wide, N=size, N_ROUNDED=triton.next_power_of_2(size), BLOCK=block,
        BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, SKIP=D is not None, GATE=z is not None, num_warps=4,
    )  # fmt: skip
    return out


# ---- short convolution


@triton.jit
def _convolve(
    hidden, state, weight, bias, out, channels, hidden_row, hidden_channel, state_row, state_channel, state_column,
    weight_channel, weight_column,
    LENGTH: tl.constexpr, PLACES: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, place = channel < channels, tl.arange(0, PLACES)
    tap = place - (LENGTH + 1 - TAPS)
    inside = live[:, None] & (place < LENGTH)[None, :]
    own = state + row * state_row + channel.to(tl.int64) * state_channel
    places = own[:, None] + (place * state_column)[None, :]
    taps = weight + channel * weight_channel
    used = tl.load(taps[:, None] + (tap * weight_column)[None, :], inside & (tap >= 0)[None, :], 0.0)
    known = tl.load(places, inside, 0.0)
    new = tl.load(hidden + row * hidden_row + channel * hidden_channel, live, 0.0)
    total = tl.sum(known.to(tl.float32) * used.to(tl.float32), 1)
    total += new.to(tl.float32) * tl.load(taps + (TAPS - 1) * weight_column, live, 0.0).to(tl.float32)
    tl.debug_barrier()  # places are overwritten after they have been read
    tl.store(places - state_column, known, inside & (place > 0)[None, :])
    tl.store(own + (LENGTH - 1) * state_column, new, live)
    if BIAS:
        total += tl.load(bias + channel, live, 0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * channels + channel, total, live)


def convolution_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """One token: hidden_states [S, C, 1], conv_state [S, C, L], weight [C, taps], bias [C]."""
    rows, channels, length = hidden_states.shape
    taps, places = weight.shape[1], conv_state.shape[2]
    if length != 1 or taps > places + 1 or activation not in (None, "silu", "swish"):
        raise Inapplicable
    if hidden_states.dtype != conv_state.dtype or hidden_states.dtype != weight.dtype:
        raise Inapplicable
    out, block = hidden_states.new_empty(rows, channels, 1), 128
    _convolve[rows, triton.cdiv(channels, block)](
        hidden_states, conv_state, weight, weight if bias is None else bias, out, channels,
        hidden_states.stride(0), hidden_states.stride(1), *conv_state.stride(), *weight.stride(),
        LENGTH=places, PLACES=triton.next_power_of_2(places), TAPS=taps, BIAS=bias is not None,
        SILU=activation is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _block(width: int) -> int:
    return min(MOST_TOGETHER, triton.next_power_of_2(width))


# ---- a whole module: Gated DeltaNet with four projections, as in Qwen3.5

PARTS = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "norm", "out_proj"}


def delta_net_step(module: nn.Module, hidden_SLD: Tensor, cache: Any) -> Tensor:
    """Its forward for one token of each sequence, without a dozen small operations on its gates and heads."""
    layer, rows, heads = cache.layers[module.layer_idx], len(hidden_SLD), (module.num_k_heads, module.num_v_heads)
    mixed = convolution_step(
        module.in_proj_qkv(hidden_SLD).transpose(1, 2), layer.conv_states[0], module.conv1d.weight.squeeze(1),
        module.conv1d.bias, module.activation,
    )  # fmt: skip
    query, key, value = mixed.view(rows, 1, -1).split([module.key_dim, module.key_dim, module.value_dim], -1)
    query, key = (x.unflatten(2, (heads[0], -1)) for x in (query, key))
    mixed = _updated(
        query, key, value.unflatten(2, (heads[1], -1)), module.in_proj_a(hidden_SLD), module.in_proj_b(hidden_SLD),
        layer.recurrent_states[0], True, (module.A_log, module.dt_bias),
    )  # fmt: skip
    gate = module.in_proj_z(hidden_SLD).view(-1, mixed.shape[-1])
    return module.out_proj(module.norm(mixed.view_as(gate), gate).view(rows, 1, -1))


def whole_step(module: nn.Module, hidden_SLD: Tensor, cache: Any) -> Tensor | None:
    """The output, if the module is of that kind and has states, and its own forward gives the same; otherwise None."""
    if not module._modules.keys() >= PARTS or not hasattr(module, "dt_bias"):
        return None
    layer = cache.layers[module.layer_idx]
    if any(getattr(layer, name, {}).get(0) is None for name in ("conv_states", "recurrent_states")):
        return None
    asked = type(module), module.value_dim, module.key_dim, hidden_SLD.shape[1:], hidden_SLD.dtype, hidden_SLD.device
    if asked not in _known_steps:
        _known_steps[asked] = _same_step(module, hidden_SLD, cache)
    return delta_net_step(module, hidden_SLD, cache) if _known_steps[asked] else None


_known_steps: dict[tuple, bool] = {}


def _same_step(module: nn.Module, hidden_SLD: Tensor, cache: Any) -> bool:
    """Whether both make the same output and states of random ones."""
    random = torch.Generator(hidden_SLD.device).manual_seed(0)
    layer, results = cache.layers[module.layer_idx], list[tuple[Tensor, ...]]()
    states = [torch.empty_like(own[0]).normal_(generator=random) for own in (layer.conv_states, layer.recurrent_states)]
    given = torch.empty_like(hidden_SLD).normal_(generator=random)
    forward = step_forward(type(module).forward)
    try:
        for run in (lambda other: forward(module, given, cache_params=other), partial(delta_net_step, module, given)):
            fresh, other = copy.copy(layer), copy.copy(cache)
            fresh.conv_states, fresh.recurrent_states = ({0: own.clone()} for own in states)
            other.layers = [*cache.layers]
            other.layers[module.layer_idx] = fresh
            results.append((run(other), fresh.conv_states[0], fresh.recurrent_states[0]))
    except (Inapplicable, AttributeError, TypeError):  # another module, or another version's
        return False
    except triton.TritonError as error:
        logger.warning("%s has no kernel here and is slower: %s", type(module).__name__, first_line(error))
        return False
    return max(map(relative_gap, *results)) <= (1e-4 if given.dtype == torch.float32 else 3e-2)


# ---- in place of transformers' functions


STEPS: dict[str, tuple[Callable, str]] = {
    "torch_recurrent_gated_delta_rule": (delta_rule_step, "initial_state"),
    "recurrent_kimi_delta_attention": (delta_rule_step, "initial_state"),
    "mamba2_selective_state_update": (selective_update_step, "state"),
    "causal_conv1d_update": (convolution_step, "conv_state"),
}
"""By the name of transformers' function: the kernel's, which has the same arguments, and which of them is the state."""


@functools.cache
def step_forward(forward: Callable) -> Callable:
    """The forward of a class of recurrent modules, for one token of each sequence."""
    whole, forward = forward, inspect.unwrap(forward)
    used = {
        name: StepFunction(forward.__globals__[name], *STEPS[name])
        for name in STEPS.keys() & set(forward.__code__.co_names) & forward.__globals__.keys()
    }
    if not used:
        return whole
    known = forward.__globals__ | used
    made = types.FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


class StepFunction:
    """A function of transformers, or the kernel for arguments on which they agree."""

    def __init__(self, original: Callable, kernel: Callable, state: str):
        self.original, self.kernel, self.state = original, kernel, state
        self._signature = inspect.signature(kernel)
        self._agree: dict[tuple, bool] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        shapes = (*map(_kind_of, arguments), *((name, _kind_of(value)) for name, value in named.items()))
        if shapes not in self._agree:
            self._agree[shapes] = self._agrees(arguments, named)
        return (self.kernel if self._agree[shapes] else self.original)(*arguments, **named)

    def _agrees(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether both make the same output and state of a random state."""
        results: list[tuple[Tensor, ...]] = []
        try:
            state = self._signature.bind(*arguments, **named).arguments.get(self.state)
        except TypeError:  # another version's arguments
            return False
        if not isinstance(state, Tensor):
            return False
        try:
            for function in (self.original, self.kernel):
                fresh = torch.empty_like(state)
                fresh.normal_(generator=torch.Generator(state.device).manual_seed(0))
                # By position and by name as here: functions of other packages have other names.
                given = [fresh if value is state else value for value in arguments]
                out = function(*given, **{name: fresh if own is state else own for name, own in named.items()})
                results.append(out if isinstance(out, tuple) else (out, fresh))
        except Inapplicable:
            return False
        except triton.TritonError as error:
            logger.warning("%s has no kernel here and is slower: %s", self.original.__name__, first_line(error))
            return False
        gap = max(map(relative_gap, *results))
        limit = 1e-4 if all(part.dtype == torch.float32 for part in results[0]) else 3e-2
        if gap > limit:
            logger.warning("%s is not replaced: its kernel differs by %.1e", self.original.__name__, gap)
        return gap <= limit


def _kind_of(value: Any) -> Any:
    """What a kernel and its arguments depend on, apart from the number of sequences."""
    if not isinstance(value, Tensor):
        return value if value is None or isinstance(value, str | int | float) else type(value)
    return value.shape[1:], value.stride()[1:], value.dtype, value.device


def relative_gap(expected: Tensor, found: Tensor) -> float:
    size = float(expected.float().norm())
    gap = float((expected.float() - found.float()).norm()) / max(size, 1e-6)
    return gap if gap == gap else float("inf")
