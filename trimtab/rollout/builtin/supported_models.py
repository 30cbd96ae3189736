"""Which models have fused layers, and their self-check against the model's modules.

A model gets fused layers (fused_layers.py) if it is Llama-like in structure and passes the self-check: every layer is
run with a few tokens, in prefill and decode, on the residual stream that the modules gave it, and compared with its
module. Over all layers rounding errors add up (in bf16 to 5 % at 32 layers of 4,096), in one layer they are so small
that a wrong one stands out.
"""

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.compile import off_by
from trimtab.models.policy import Policy
from trimtab.models.pretrained import first_line
from trimtab.rollout.builtin.fused_layers import FusedLayers, precompile
from trimtab.rollout.builtin.kv_cache import KVCache, KVShape
from trimtab.rollout.builtin.model_runner import ModelRunner

logger = logging.getLogger(__name__)

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
WHOLE_TOLERANCE = 0.3
READ = 9  # tokens of the self-check's prefill, before one decode step


def build_fused_layers(policy: Policy, shape: KVShape, arguments: list[dict], page: int) -> FusedLayers | None:
    """The policy's fused layers, if the device has kernels, the model is supported and the self-check passes. `page`:
    tokens of a page."""
    backbone = policy.inner.base_model
    # Fused projections split query, key and value into heads of one width.
    if shape.key_width != shape.value_width or not has_kernels(policy.device) or not is_supported(backbone):
        return None
    used = ("scaling", "sliding_window", "softcap")
    fused = FusedLayers(backbone, [{name: asked.get(name) for name in used} for asked in arguments])
    try:
        precompile(fused, shape, page, (1, READ))
        return fused if passes_self_check(fused, policy, shape, page) else None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel compiler may fail in many ways; the modules do not need it
        logger.warning("the model's layers are not fused and generate more slowly: %s", first_line(error))
        return None


@torch.no_grad()
def passes_self_check(fused: FusedLayers, policy: Policy, shape: KVShape, page: int) -> bool:
    with _streams(fused.backbone) as passes:
        expected = _few_hidden_states(policy, _memory(shape, page, policy.device), None)
    followed = CheckedLayers(fused, passes)
    found = _few_hidden_states(policy, _memory(shape, page, policy.device), followed)
    ends = _is_close(found, expected, torch.zeros_like(expected))
    whole = _few_hidden_states(policy, _memory(shape, page, policy.device), fused).float() - expected.float()
    # Over all layers, with accumulated rounding errors.
    return followed.same and ends and bool(whole.norm() <= WHOLE_TOLERANCE * expected.float().norm())


class CheckedLayers(FusedLayers):
    """Fused layers that each start from the residual stream of the modules, and are compared with them."""

    def __init__(self, fused: FusedLayers, passes: list[list[Tensor]]):
        """`passes`: of each pass the residual stream [T, D] before every layer and after the last."""
        super().__init__(fused.backbone, fused.arguments)
        self.passes, self.same = iter(passes), True

    def give_up_after(self, error: Exception) -> bool:
        return False

    def hidden(self, ids_T: Tensor, positions_T: Tensor, cache: KVCache, slot_mapping_T: Tensor, attend) -> Tensor:
        streams, angles = next(self.passes), self.angles(positions_T)
        first = self.backbone.embed_tokens(ids_T)
        self.same &= _is_close(first, streams[0], torch.zeros_like(first))
        for index, (before, after) in enumerate(pairwise(streams)):
            found = before.clone()
            normed = self.run_layers(range(index, index + 1), found, angles, cache, slot_mapping_T, attend)
            self.same &= _is_close(found, after, before)
        return normed


def _is_close(found_TD: Tensor, expected_TD: Tensor, before_TD: Tensor) -> bool:
    return bool((off_by(found_TD, expected_TD, before_TD) <= 1).all())


@contextlib.contextmanager
def _streams(backbone: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record the residual stream [T, D] before every layer and after the last, of each pass inside."""
    passes: list[list[Tensor]] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if module is backbone.layers[0]:
            passes.append([])
        stream = given[0] if given else named["hidden_states"]
        passes[-1].append(stream.flatten(0, -2))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in (*backbone.layers, backbone.norm)]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def _memory(shape: KVShape, page: int, device: torch.device) -> KVCache:
    return KVCache(shape, -(-(READ + 1) // page), page, device)


def _few_hidden_states(policy: Policy, cache: KVCache, fused: FusedLayers | None) -> Tensor:
    ids = [(7 * i + 3) % policy.head.out_features for i in range(READ + 1)]
    pages = list(range(1, -(-len(ids) // cache.size) + 1))
    tensor = partial(torch.tensor, device=policy.device)
    with ModelRunner(policy, cache, fused) as runner:
        read = runner.prefill([(ids[:-1], 0, pages)])
        decoded = runner.decode(tensor(ids[-1:]), tensor([len(ids) - 1]), tensor([pages]))
    return torch.cat([read, decoded])


def is_supported(backbone: nn.Module) -> bool:
    names = {"embed_tokens", "layers", "norm", "rotary_emb"}
    silu = getattr(backbone.config, "hidden_act", None) in ("silu", "swish")
    return silu and names == _children(backbone) and all(_is_known_layer(layer) for layer in backbone.layers)


def _is_known_layer(layer: nn.Module) -> bool:
    if _children(layer) != LAYER:
        return False
    heads_normed = _children(layer.self_attn) == ATTENTION | HEAD_NORMS
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [layer.self_attn.q_norm, layer.self_attn.k_norm] if heads_normed else []
    return (
        (heads_normed or _children(layer.self_attn) == ATTENTION)
        and _children(layer.mlp) == MLP
        and all(hasattr(norm, "variance_epsilon") and norm.weight.ndim == 1 for norm in norms)
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
