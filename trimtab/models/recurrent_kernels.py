"""Recurrent layers without gradients. Decode steps: each state is read and written once, in place.

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
NARROW, WARPS = 8, 1  # the same, and its warps, if it runs over whole sequences (tuned on an H200)
LONGEST = 4096  # tokens of such a sequence: if it is alone, chunks are as fast


class Inapplicable(Exception):
    """The kernel does not know such arguments."""


# ---- gated delta rule


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(do_not_specialize=["length"])
def _delta_rule(
    query, key, value, decay, beta, rate, bias, state, out, scale, heads, group, length,
    query_row, query_token, query_head, query_column, key_row, key_token, key_head, key_column,
    value_row, value_token, value_head, value_column, decay_row, decay_token, decay_head, decay_column,
    beta_row, beta_token, beta_head,
    K: tl.constexpr, V: tl.constexpr, K_ROUNDED: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    BY_KEY: tl.constexpr, GATES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    k, v = tl.arange(0, K_ROUNDED), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    query += row * query_row + head // group * query_head
    key += row * key_row + head // group * key_head
    value += row * value_row + head * value_head
    decay += row * decay_row + head * decay_head
    beta += row * beta_row + head * beta_head
    out += (row * length * heads + head) * V
    kept = (k < K)[:, None] & (v < V)[None, :]
    own = state + pair * K * V + k[:, None] * V + v[None, :]
    # WHOLE: sequences from their first token
    state_KV = tl.zeros([K_ROUNDED, BLOCK], tl.float32) if WHOLE else tl.load(own, kept, 0.0).to(tl.float32)
    for _ in range(length if WHOLE else 1):
        q_K = tl.load(query + k * query_column, k < K, 0.0).to(tl.float32)
        k_K = tl.load(key + k * key_column, k < K, 0.0).to(tl.float32)
        v_V = tl.load(value + v * value_column, v < V, 0.0).to(tl.float32)
        beta_1 = tl.load(beta).to(tl.float32)
        if BY_KEY:
            state_KV *= tl.exp(tl.load(decay + k * decay_column, k < K, 0.0).to(tl.float32))[:, None]
        else:
            decay_1 = tl.load(decay).to(tl.float32)
            if GATES:  # this and beta are what the projections gave
                decay_1 = _softplus(decay_1 + tl.load(bias + head).to(tl.float32))
                decay_1 *= -tl.exp(tl.load(rate + head).to(tl.float32))
                beta_1 = tl.sigmoid(beta_1).to(beta.dtype.element_ty).to(tl.float32)
            state_KV *= tl.exp(decay_1)
        if NORM:
            q_K *= tl.rsqrt(tl.sum(q_K * q_K) + 1e-6)
            k_K *= tl.rsqrt(tl.sum(k_K * k_K) + 1e-6)
        change_V = (v_V - tl.sum(state_KV * k_K[:, None], 0)) * beta_1
        state_KV += k_K[:, None] * change_V[None, :]
        tl.store(out + v, tl.sum(state_KV * (q_K * scale)[:, None], 0), v < V)
        query += query_token
        key += key_token
        value += value_token
        decay += decay_token
        beta += beta_token
        out += heads * V
    tl.store(own, state_KV, kept)


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
    gates: tuple[Tensor, Tensor] | None = None, *, whole: bool = False,
) -> Tensor:  # fmt: skip
    """Queries and keys may have fewer heads. `gates`, A_log and dt_bias of each head: `decay` and `beta` are inputs of
    softplus and sigmoid. `whole`: all tokens of sequences, and `state` is only written."""
    (rows, length, heads, wide), width = value.shape, key.shape[3]
    if state is None or state.shape != (rows, heads, width, wide) or not state.is_contiguous() or heads % key.shape[2]:
        raise Inapplicable
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    block = NARROW if whole else _block(wide)
    _delta_rule[rows * heads, triton.cdiv(wide, block)](
        query, key, value, decay, beta, *(gates or (decay, beta)), state, out, width**-0.5, heads,
        heads // key.shape[2], length, *query.stride(), *key.stride(), *value.stride(), *decay.stride()[:3],
        decay.stride(3) if decay.dim() == 4 else 0, *beta.stride()[:3],
        K=width, V=wide, K_ROUNDED=triton.next_power_of_2(width), BLOCK=block, NORM=norm, BY_KEY=decay.dim() == 4,
        GATES=gates is not None, WHOLE=whole, num_warps=WARPS if whole else 4,
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


@triton.jit(do_not_specialize=["length"])
def _convolve_rows(
    hidden, weight, bias, out, length, channels, hidden_row, hidden_token, hidden_channel,
    weight_channel, weight_column,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = (token < length)[:, None] & (channel < channels)[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = token + (tap - (TAPS - 1))
        own = hidden + row * hidden_row + place[:, None] * hidden_token + (channel * hidden_channel)[None, :]
        x = tl.load(own, live & (place >= 0)[:, None], 0.0).to(tl.float32)
        used = tl.load(weight + channel * weight_channel + tap * weight_column, channel < channels, 0.0)
        total += x * used.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, channel < channels, 0.0).to(tl.float32)[None, :]
    total = total.to(out.dtype.element_ty).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + (row * length + token)[:, None] * channels + channel[None, :], total, live)


def convolved_rows(hidden_SLC: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Whole sequences from their first token; weight [C, taps]."""
    if activation not in (None, "silu", "swish") or hidden_SLC.dtype != weight.dtype:
        raise Inapplicable
    (rows, length, channels), tokens, block = hidden_SLC.shape, 16, 128
    out = torch.empty_like(hidden_SLC, memory_format=torch.contiguous_format)
    _convolve_rows[rows, triton.cdiv(length, tokens), triton.cdiv(channels, block)](
        hidden_SLC, weight, weight if bias is None else bias, out, length, channels, *hidden_SLC.stride(),
        *weight.stride(), TAPS=weight.shape[1], BIAS=bias is not None, SILU=activation is not None, TOKENS=tokens,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _block(width: int) -> int:
    return min(MOST_TOGETHER, triton.next_power_of_2(width))


# ---- a whole module: Gated DeltaNet with four projections, as in Qwen3.5

PARTS = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "norm", "out_proj"}


def delta_net(module: nn.Module, hidden_SLD: Tensor, cache: Any) -> Tensor:
    """Its forward for one more token of each sequence, or for whole sequences if the cache has no states: without a
    dozen small operations on its gates and heads, and without chunks."""
    rows, length, _ = hidden_SLD.shape
    mixed, weight, whole = module.in_proj_qkv(hidden_SLD), module.conv1d.weight.squeeze(1), _is_fresh(module, cache)
    if whole:
        cache.update_conv_state(mixed.transpose(1, 2), module.layer_idx, conv_kernel_size=module.conv_kernel_size)
        mixed = convolved_rows(mixed, weight, module.conv1d.bias, module.activation)
        shape = rows, module.num_v_heads, module.head_k_dim, module.head_v_dim
        state = hidden_SLD.new_empty(shape, dtype=torch.float32)
    else:
        layer = cache.layers[module.layer_idx]
        state, given = layer.recurrent_states[0], (layer.conv_states[0], weight, module.conv1d.bias, module.activation)
        mixed = convolution_step(mixed.transpose(1, 2), *given).view(rows, 1, -1)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    query, key = (x.unflatten(2, (module.num_k_heads, -1)) for x in (query, key))
    mixed = _updated(
        query, key, value.unflatten(2, (module.num_v_heads, -1)), module.in_proj_a(hidden_SLD),
        module.in_proj_b(hidden_SLD), state, True, (module.A_log, module.dt_bias), whole=whole,
    )  # fmt: skip
    if whole:
        cache.update_recurrent_state(state, module.layer_idx)
    gate = module.in_proj_z(hidden_SLD).view(-1, mixed.shape[-1])
    return module.out_proj(module.norm(mixed.view_as(gate), gate).view(rows, length, -1))


def _is_fresh(module: nn.Module, cache: Any) -> bool:
    """Whether the cache has no states of it yet."""
    return not cache.layers[module.layer_idx].has_previous_state[0]


def delta_net_output(module: nn.Module, hidden_SLD: Tensor, cache: Any) -> Tensor | None:
    """The output, if the module is of that kind, and its own forward gives the same; otherwise None."""
    if not module._modules.keys() >= PARTS or not hasattr(module, "dt_bias"):
        return None
    layer, length = cache.layers[module.layer_idx], hidden_SLD.shape[1]
    if not isinstance(getattr(layer, "has_previous_state", None), dict) or getattr(layer, "record_past", False):
        return None
    if length > (LONGEST if (fresh := _is_fresh(module, cache)) else 1):
        return None
    asked = type(module), module.value_dim, module.key_dim, hidden_SLD.shape[2], hidden_SLD.dtype, hidden_SLD.device
    if (*asked, fresh) not in _known:
        _known[*asked, fresh] = _is_same(module, hidden_SLD, cache)
    return delta_net(module, hidden_SLD, cache) if _known[*asked, fresh] else None


_known: dict[tuple, bool] = {}


def _is_same(module: nn.Module, hidden_SLD: Tensor, cache: Any) -> bool:
    """Whether both make the same output and states of random ones, or from none."""
    random = torch.Generator(hidden_SLD.device).manual_seed(0)
    layer, results = cache.layers[module.layer_idx], list[tuple[Tensor, ...]]()
    given = torch.empty_like(hidden_SLD).normal_(generator=random)
    kinds = layer.conv_states[0], layer.recurrent_states[0]
    states = [None if own is None else torch.empty_like(own).normal_(generator=random) for own in kinds]
    forward = step_forward(type(module).forward)
    try:
        for run in (lambda other: forward(module, given, cache_params=other), partial(delta_net, module, given)):
            fresh, other = copy.copy(layer), copy.copy(cache)
            for name, value in vars(layer).items():  # what is kept for each number of a state
                if isinstance(value, dict):
                    setattr(fresh, name, dict(value))
            for own, state in zip((fresh.conv_states, fresh.recurrent_states), states):
                own[0] = None if state is None else state.clone()
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
