"""Which models are Llama-like enough for fused layers.

A model is recognised by its structure and then believed only after every layer, read and decoded with a few tokens,
does what its modules do. Each is given the stream that the modules gave theirs: over all layers rounding adds up (in
bf16 to 5 % at 32 layers of 4,096), of one it leaves so little that a wrong one stands out. Anything else runs through
its modules.
"""

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.comparing import off_by
from trimtab.models.hugging_face import first_line
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.ahead import compile_ahead
from trimtab.rollout.builtin.cache import KVCache, KVShape
from trimtab.rollout.builtin.fused_layers import FusedLayers
from trimtab.rollout.builtin.runner import Runner

logger = logging.getLogger(__name__)

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
WHOLE_TOLERANCE = 0.3
READ = 9  # tokens, before one is decoded


def recognised(policy: Policy, shape: KVShape, arguments: list[dict], page: int) -> FusedLayers | None:
    """The policy's layers fused, where the device has kernels and the numbers are its own. `page`: its tokens, in the
    memory that they will work with."""
    backbone = policy.inner.base_model
    # Fused projections cut query, key and value into heads of one width.
    if shape.key_width != shape.value_width or not has_kernels(policy.device) or not looks_like_llama(backbone):
        return None
    used = ("scaling", "sliding_window", "softcap")
    fused = FusedLayers(backbone, [{name: asked.get(name) for name in used} for asked in arguments])
    try:
        compile_ahead(fused, shape, page, (1, READ))
        return fused if does_the_same(fused, policy, shape, page) else None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a device's compiler may fail in many ways, and the modules need none
        logger.warning("the model's layers are not fused and generate more slowly: %s", first_line(error))
        return None


@torch.no_grad()
def does_the_same(fused: FusedLayers, policy: Policy, shape: KVShape, page: int) -> bool:
    with _streams(fused.backbone) as passes:
        expected = _few_hidden_states(policy, _memory(shape, page, policy.device), None)
    followed = FollowedLayers(fused, passes)
    found = _few_hidden_states(policy, _memory(shape, page, policy.device), followed)
    ends = _is_close(found, expected, torch.zeros_like(expected))
    whole = _few_hidden_states(policy, _memory(shape, page, policy.device), fused).float() - expected.float()
    # From one layer to the next, where rounding has added up.
    return followed.same and ends and bool(whole.norm() <= WHOLE_TOLERANCE * expected.float().norm())


class FollowedLayers(FusedLayers):
    """Each layer goes on from what the modules' last one left, and is compared with theirs."""

    def __init__(self, fused: FusedLayers, passes: list[list[Tensor]]):
        """`passes`: of each the stream [T, D] before every layer, and after the last."""
        super().__init__(fused.backbone, fused.arguments)
        self.passes, self.same = iter(passes), True

    def give_up_after(self, error: Exception) -> bool:
        return False

    def hidden(self, ids_T: Tensor, positions_T: Tensor, cache: KVCache, places_T: Tensor, attend) -> Tensor:
        streams, angles = next(self.passes), self.angles(positions_T)
        first = self.backbone.embed_tokens(ids_T)
        self.same &= _is_close(first, streams[0], torch.zeros_like(first))
        for index, (before, after) in enumerate(pairwise(streams)):
            found = before.clone()
            normed = self.through(range(index, index + 1), found, angles, cache, places_T, attend)
            self.same &= _is_close(found, after, before)
        return normed


def _is_close(found_TD: Tensor, expected_TD: Tensor, before_TD: Tensor) -> bool:
    return bool((off_by(found_TD, expected_TD, before_TD) <= 1).all())


@contextlib.contextmanager
def _streams(backbone: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Of each pass inside, the stream before every layer and after the last [T, D]."""
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
    with Runner(policy, cache, fused) as runner:
        read = runner.read([(ids[:-1], 0, pages)])
        decoded = runner.decode(tensor(ids[-1:]), tensor([len(ids) - 1]), tensor([pages]))
    return torch.cat([read, decoded])


def looks_like_llama(backbone: nn.Module) -> bool:
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
