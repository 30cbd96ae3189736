"""Decoder layers of Llama-like models on fused kernels, for training and scoring (--exact).

The built-in engine runs the same kernels (rollout/builtin/fused_layers.py), so in bf16 the log-prob of a sampled token
is, bit for bit, the one of the training forward pass. It needs no compiler either.

cuBLAS splits the inner dimension of some products with few rows, which changes the order of the sum. So each product
with few rows is tried once, on random rows: if cuBLAS gives the bits of the kernel that never splits, it is used.

LoRA: y = W x + b + B (s A x), where both terms and s A x are rounded first, as by PEFT. Merging s B A into W would be
faster and wrong: in half precision a weight does not change by less than half of its last bit, and a few optimizer
steps change B by less.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.attention import PackedPass, carried, with_window
from trimtab.models.precompile import is_noting
from trimtab.models.routing import is_softmax_router

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
EXPERTS = {"gate_up_proj", "down_proj"}


def is_llama_like(backbone: nn.Module) -> bool:
    """In structure; whether the layers compute the same is left to the self-checks."""
    names = {"embed_tokens", "layers", "norm", "rotary_emb"}
    silu = getattr(backbone.config, "hidden_act", None) in ("silu", "swish")
    return silu and names == _children(backbone) and all(_is_known_layer(layer) for layer in backbone.layers)


def modules_of_layers(backbone: nn.Module) -> list[nn.Module]:
    """The projections of all layers of a Llama-like model."""
    found = [(layer.self_attn, layer.mlp) for layer in backbone.layers]
    return [getattr(part, name) for parts in found for part in parts for name in _children(part) if "_proj" in name]


def _is_known_layer(layer: nn.Module) -> bool:
    if _children(layer) != LAYER:
        return False
    heads_normed = _children(layer.self_attn) == ATTENTION | HEAD_NORMS
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if heads_normed:
        norms += (of_heads := [layer.self_attn.q_norm, layer.self_attn.k_norm])
        if any(len(norm.weight) != getattr(layer.self_attn, "head_dim", 0) for norm in of_heads):
            return False
    return (
        (heads_normed or _children(layer.self_attn) == ATTENTION)
        and not layer.self_attn._parameters  # such as sinks
        and not _scales_by_position(type(layer.self_attn))
        and (_children(layer.mlp) == MLP or is_mixture(layer.mlp))
        and all(hasattr(norm, "variance_epsilon") and norm.weight.ndim == 1 for norm in norms)
    )


def _scales_by_position(attention: type[nn.Module]) -> bool:
    """Whether the position changes more than rotary angles, as queries of Ministral 3 beyond its first context."""
    return "position_ids" in inspect.signature(attention.forward).parameters


def is_mixture(mlp: nn.Module) -> bool:
    """Softmax over experts, of which the most likely ones are gated MLPs in two stacked tensors."""
    if _children(mlp) != {"gate", "experts"} or mlp._parameters or mlp._buffers:
        return False
    router, experts = mlp.gate, mlp.experts
    return (
        is_softmax_router(router)
        and experts._parameters.keys() | experts._buffers.keys() == EXPERTS
        and experts.gate_up_proj.shape[2] == router.weight.shape[1]
        and not _is_split(experts.gate_up_proj)
    )


def _is_split(weight: Tensor) -> bool:
    """By tensor parallelism. What FSDP shards is whole while a layer runs."""
    mesh = getattr(weight, "device_mesh", None)
    return mesh is not None and "tensor" in (mesh.mesh_dim_names or ())


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def head_norms(attention: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    if not hasattr(attention, "q_norm"):
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


# ---- products


@dataclass(frozen=True, eq=False)
class LoraLinear:
    """A linear layer as kernels see it. Without an adapter it has neither A nor B."""

    weight_OI: Tensor
    bias_O: Tensor | None
    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scale: float = 0.0

    @property
    def rank(self) -> int:
        return 0 if self.a_RI is None else len(self.a_RI)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight_OI, self.bias_O, self.a_RI, self.b_OR


def lora_linear(module: nn.Module) -> LoraLinear | None:
    """None: the kernels do not support the module (4-bit or int8 weights, DoRA, several adapters at once)."""
    if type(module) is nn.Linear:
        return None if "forward" in vars(module) else LoraLinear(module.weight, module.bias)
    if not hasattr(module, "lora_A"):
        return None
    from peft.tuners.lora import Linear

    if type(module) is not Linear or type(module.base_layer) is not nn.Linear or "forward" in vars(module.base_layer):
        return None
    weight, bias = module.base_layer.weight, module.base_layer.bias
    if module.disable_adapters or module.merged:
        return None if module.disable_adapters and module.merged else LoraLinear(weight, bias)
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return LoraLinear(weight, bias)
    a, b = module.lora_A[names[0]], module.lora_B[names[0]]
    if len(names) > 1 or names[0] in module.lora_variant or b.bias is not None:
        return None
    return LoraLinear(weight, bias, a.weight, b.weight, module.scaling[names[0]])


ENOUGH = 2**22
"""Results of a product from which cuBLAS has enough work without splitting the inner dimension: twice the processors of
an H200 in tiles of 128 x 128."""
NARROW = 128
"""Outputs of a product whose inner dimension cuBLAS splits for many rows, too."""
FEWER_ROWS = 128, 512
_tried: dict[tuple, bool] = {}  # by shape: whether cuBLAS may be used


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b, the same bits for a row whatever the others. `dtype`: of the result, if there is no bias."""
    dtype = dtype or x_TI.dtype
    rows, outputs = len(x_TI), len(weight_OI)
    if x_TI.dtype != torch.bfloat16 or not has_kernels(x_TI.device):
        return _by_cublas(x_TI, weight_OI, bias_O, dtype)
    if outputs <= NARROW:
        return _Product.apply(x_TI, weight_OI, bias_O, dtype)
    _note_fewer_rows(x_TI, weight_OI, bias_O, dtype, ENOUGH // outputs)
    if rows * outputs >= ENOUGH:
        return _by_cublas(x_TI, weight_OI, bias_O, dtype)
    key = x_TI.device.index, rows, *weight_OI.shape, bias_O is None, dtype
    if (may_use_cublas := _tried.get(key)) is None:
        may_use_cublas = _is_bit_equal(rows, weight_OI, bias_O, dtype)
        if not is_noting():
            _tried[key] = may_use_cublas
    return (_by_cublas if may_use_cublas else _Product.apply)(x_TI, weight_OI, bias_O, dtype)


def _note_fewer_rows(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, most: int, onto: Tensor | None = None
) -> None:
    """Products of short passes, up to `most` rows, are compiled with the first ones: their tiles are others."""
    if not is_noting():
        return
    from trimtab.models import layer_kernels

    for fewer in FEWER_ROWS:
        if fewer < min(len(x_TI), most):
            part = None if onto is None else onto[:fewer]
            layer_kernels.product(x_TI[:fewer].contiguous(), weight_OI.contiguous(), bias_O, dtype, onto=part)


def _by_cublas(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype == x_TI.dtype:
        return F.linear(x_TI, weight_OI, bias_O)
    assert bias_O is None
    return torch.mm(x_TI, weight_OI.t(), out_dtype=dtype)


@torch.no_grad()
def _is_bit_equal(rows: int, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether cuBLAS gives the bits of the kernel that never splits, for this many rows."""
    generator = torch.Generator(weight_OI.device).manual_seed(0)
    shape = rows, weight_OI.shape[1]
    x = torch.randn(shape, device=weight_OI.device, generator=generator).to(weight_OI.dtype)
    given = x, weight_OI, bias_O, dtype
    return torch.equal(_by_cublas(*given), _Product.apply(*given))


def _add_product(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> None:
    if out_TO.dtype == torch.bfloat16 and has_kernels(out_TO.device):
        from trimtab.models import layer_kernels

        layer_kernels.product(x_TI, weight_OI.contiguous(), None, out_TO.dtype, onto=out_TO)
        _note_fewer_rows(x_TI, weight_OI, None, out_TO.dtype, len(x_TI), onto=out_TO)
    else:
        out_TO.add_(F.linear(x_TI, weight_OI))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        from trimtab.models import layer_kernels

        ctx.save_for_backward(x, weight)
        return layer_kernels.product(x.contiguous(), weight.contiguous(), bias, dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )


# ---- layers


class FusedLayer:
    """Takes the place of a decoder layer's forward in passes over packed rows."""

    def __init__(self, layer: nn.Module):
        self._layer = [layer]  # in a list, so that it is not registered as a submodule

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        layer = self._layer[0]
        current: PackedPass = carried(layer)
        current.calls += 1
        assert position_embeddings is not None and current.row is not None
        attention, mlp = layer.self_attn, layer.mlp
        stream, cos, sin = (x[0].contiguous() for x in (hidden_states, *position_embeddings))
        width = cos.shape[1]
        norm = layer.input_layernorm
        stream, x = AddNorm.apply(stream, None, norm.weight, norm.variance_epsilon)
        query, key, value = apply_linears([attention.q_proj, attention.k_proj, attention.v_proj], x)
        norms = head_norms(attention)
        query, key = Rotate.apply(query, key, cos, sin, *(norms or (None, None, 0.0)))
        arguments = with_window(layer, attention_mask, {"scaling": attention.scaling, "fused": True})
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value.unflatten(1, (-1, width))))
        mixed = current.row.attend(q, k, v, arguments)[0]
        norm = layer.post_attention_layernorm
        new = apply_linear(attention.o_proj, mixed.flatten(1))
        stream, x = AddNorm.apply(stream, new, norm.weight, norm.variance_epsilon)
        if is_mixture(mlp):
            out = apply_experts(mlp, x)
        else:
            out = apply_linear(mlp.down_proj, Gate.apply(*apply_linears([mlp.gate_proj, mlp.up_proj], x)))
        return stream[None] + out[None]  # no view: FSDP hooks the result


class FusedNorm:
    """Takes the place of the last norm's forward, in passes with fused layers."""

    def __init__(self, norm: nn.Module):
        self._norm, self._plain = [norm], norm.forward

    def __call__(self, hidden_states: Tensor) -> Tensor:
        norm, current = self._norm[0], carried(self._norm[0])
        if not (isinstance(current, PackedPass) and current.compiled):
            return self._plain(hidden_states)
        return AddNorm.apply(hidden_states[0], None, norm.weight, norm.variance_epsilon)[1][None]


def apply_linear(module: nn.Module, x_TI: Tensor) -> Tensor:
    layer = lora_linear(module)
    return module(x_TI) if layer is None else _Linears.apply(x_TI, [layer.scale], *layer.tensors)[0]


def apply_linears(modules: list[nn.Module], x_TI: Tensor) -> tuple[Tensor, ...]:
    """Several modules on the same input, all of which kernels support."""
    layers = [layer for module in modules if (layer := lora_linear(module)) is not None]
    return _Linears.apply(x_TI, [layer.scale for layer in layers], *(t for layer in layers for t in layer.tensors))


class _Linears(torch.autograd.Function):
    """Layers with the same rows, whose gradients are added up inside the products of the backward pass. Four tensors
    each: W, b, A, B."""

    @staticmethod
    def forward(ctx, x, scales, *tensors):
        made, lows = [], []
        for scale, (weight, bias, a, b) in zip(scales, _fours(tensors)):
            made.append(linear(x, weight, bias))
            lows.append(None if a is None else linear(x, a, None).mul_(scale))
            if lows[-1] is not None:
                _add_product(made[-1], lows[-1], b)
        ctx.scales = scales
        ctx.save_for_backward(x, *tensors, *lows)
        return tuple(made)

    @staticmethod
    def backward(ctx, *grads):
        x, *saved = ctx.saved_tensors
        tensors, lows = saved[: -len(grads)], saved[-len(grads) :]
        needs_x, _, *needed = ctx.needs_input_grad
        back, found = None, []
        for scale, grad, low, (weight, _, a, b), needs in zip(
            ctx.scales, grads, lows, _fours(tensors), _fours(needed), strict=True
        ):
            low_grad = None if low is None else (grad @ b).mul_(scale)
            if needs_x:
                back = grad @ weight if back is None else back.addmm_(grad, weight)
                if low_grad is not None:
                    back.addmm_(low_grad, a)
            for wanted, left, right in zip(needs, (grad, grad, low_grad, grad), (x, None, x, low)):
                found.append((left.sum(0) if right is None else left.t() @ right) if wanted else None)
        return back, None, *found


def _fours(given: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*[iter(given)] * 4)


class AddNorm(torch.autograd.Function):
    """(stream + new, its RMS norm)"""

    @staticmethod
    def forward(ctx, stream, new, weight, epsilon):
        from trimtab.models import layer_kernels

        stream, normed = layer_kernels.add_rms_norm(new, stream, weight, epsilon)
        ctx.save_for_backward(stream, weight)
        ctx.epsilon, ctx.added = epsilon, new is not None
        return stream, normed

    @staticmethod
    def backward(ctx, grad_stream, grad_normed):
        from trimtab.models import layer_kernels

        stream, weight = ctx.saved_tensors
        back, grad_weight = layer_kernels.norm_backward(
            grad_normed.contiguous(), None if grad_stream is None else grad_stream.contiguous(), stream, weight,
            ctx.epsilon, learns=ctx.needs_input_grad[2],
        )  # fmt: skip
        return back, back if ctx.added else None, grad_weight, None


class Rotate(torch.autograd.Function):
    """Queries and keys [T, heads, W] with rotary positions, after head norms if there are any."""

    @staticmethod
    def forward(ctx, query, key, cos, sin, query_norm, key_norm, epsilon):
        from trimtab.models import layer_kernels

        norms = None if query_norm is None else (query_norm, key_norm, epsilon)
        made = layer_kernels.rotate(query, key, cos, sin, norms)
        ctx.save_for_backward(*((query, key) if norms else (None, None)), cos, sin, query_norm, key_norm)
        ctx.epsilon = epsilon
        return made

    @staticmethod
    def backward(ctx, grad_query, grad_key):
        from trimtab.models import layer_kernels

        query, key, cos, sin, *norms = ctx.saved_tensors
        found, sums = [], []
        for grad, before, norm, learns in zip((grad_query, grad_key), (query, key), norms, ctx.needs_input_grad[4:6]):
            own = None if norm is None else (norm, ctx.epsilon)
            back, total = layer_kernels.rotate_backward(grad, grad if before is None else before, cos, sin, own, learns)
            found.append(back)
            sums.append(total)
        return *found, None, None, *sums, None


class Gate(torch.autograd.Function):
    """silu(gate) * up"""

    @staticmethod
    def forward(ctx, gate, up):
        from trimtab.models import layer_kernels

        ctx.save_for_backward(gate, up)
        return layer_kernels.gated(gate, up)

    @staticmethod
    def backward(ctx, grad):
        from trimtab.models import layer_kernels

        return layer_kernels.gate_backward(grad.contiguous(), *ctx.saved_tensors)


# ---- mixtures of experts


def apply_experts(mlp: nn.Module, x_TD: Tensor) -> Tensor:
    router, experts = mlp.gate, mlp.experts
    logits = linear(x_TD, router.weight, None)
    normed = getattr(router, "norm_topk_prob", True)
    dtype = x_TD.dtype if hasattr(router, "norm_topk_prob") else torch.float32  # Mixtral's are not rounded
    replayed: Iterator[Tensor] | None = vars(router).get("replayed")
    given = None if replayed is None else next(replayed)
    weights, chosen = Route.apply(logits, router.top_k, normed, dtype, given)
    for hook in experts._forward_pre_hooks.values():  # such as one that counts tokens (routing.py)
        hook(experts, (x_TD, chosen, weights), {})
    return Experts.apply(x_TD, weights, chosen, experts.gate_up_proj, experts.down_proj)


class Route(torch.autograd.Function):
    """Weights and numbers of the most likely experts, or of those that are given."""

    @staticmethod
    def forward(ctx, logits, k, normed, dtype, given):
        from trimtab.models import expert_kernels

        weights, chosen = expert_kernels.route(logits, k, normed, dtype, given)
        ctx.save_for_backward(logits, chosen)
        ctx.normed = normed
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TK, _):
        logits, chosen = ctx.saved_tensors
        share_TE = logits.float().softmax(1)
        picked_TK = share_TE.gather(1, chosen.long())
        grad_TK = grad_TK.float()
        if ctx.normed:
            total = picked_TK.sum(1, keepdim=True)
            grad_TK = (grad_TK - (grad_TK * picked_TK).sum(1, keepdim=True) / total) / total
        weighted_TK = grad_TK * picked_TK
        back = -share_TE * weighted_TK.sum(1, keepdim=True)
        return back.scatter_add_(1, chosen.long(), weighted_TK).to(logits.dtype), None, None, None, None


class Experts(torch.autograd.Function):
    """Sums of the chosen experts' gated MLPs. No token is dropped, whatever the balance."""

    @staticmethod
    def forward(ctx, x, weights, chosen, gate_up, down):
        from trimtab.models import expert_kernels, layer_kernels

        k = chosen.shape[1]
        order, starts = expert_kernels.sort_slots(chosen, len(gate_up))
        product = expert_kernels.grouped_product
        if any(ctx.needs_input_grad):
            both = product(x, gate_up, order, starts, k=k, gathered=True)
            inside = layer_kernels.gated(*both.chunk(2, 1))
            ctx.save_for_backward(x, weights, gate_up, down, both, order, starts)
        else:
            inside = product(x, gate_up, order, starts, k=k, gathered=True, gated=True)
        return expert_kernels.combine(product(inside, down, order, starts, scattered=True), weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        from trimtab.models import expert_kernels

        x, weights, gate_up, down, both, order, starts = ctx.saved_tensors
        needs_x, _, _, needs_gate_up, needs_down = ctx.needs_input_grad
        tokens, ends = order // weights.shape[1], starts[1:]
        grad_SD = grad[tokens]
        grad_inside = F.grouped_mm(grad_SD, down, offs=ends)
        grad_both, weighted, grad_weights = expert_kernels.experts_gate_backward(grad_inside, both, weights, order)
        grad_down = F.grouped_mm(grad_SD.t(), weighted, offs=ends) if needs_down else None
        grad_gate_up = F.grouped_mm(grad_both.t(), x[tokens], offs=ends) if needs_gate_up else None
        back = None
        if needs_x:
            rows = F.grouped_mm(grad_both, gate_up, offs=ends)
            back = expert_kernels.sum_of_slots(rows, order, weights.shape[1])
        return back, grad_weights.to(weights.dtype), None, grad_gate_up, grad_down
