"""The self-check for a model whose weights nobody holds: on a copy of its configuration, small in every way.

Which path is right, and how often attention is called, depends on the code, and neither on weights nor on width. But
not every kind of model can be made narrow: where that fails, or leads to the last resort, layers of full width decide.
"""

import copy
import math
from typing import Any

import torch
from torch import nn

from trimtab.models.packed import PackedModel
from trimtab.models.selfcheck import Verdict, choose_path, use_attention

LAYERS, VOCABULARY = 2, 1024
HEADS = 2  # of keys and values, and of queries for each of those
EXPERTS = 8  # or twice those a token goes to
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
INNER_STEP = 32  # kernels for experts want round widths
AS_WIDE = ("word_embed_proj_dim",)  # where it differs from the width there are modules more
INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")  # how names of inner widths end
OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def choose_path_without_weights(
    module: PackedModel, *, packed_allowed: bool, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """Decide the path of a skeleton, and set it up for it. `dtype`, `device`: where it will work."""

    def check(config: Any) -> tuple[Verdict, str]:
        root = type(module)(_miniature(type(module.inner), config)).to(device)
        for parameter in root.parameters():
            parameter.data = parameter.data.to(dtype)
        return choose_path(root, packed_allowed=packed_allowed), root.config._attn_implementation

    small = shallow(module.config)
    try:
        verdict, attention = check(narrow(small))
    except Exception:  # a width that this kind of model cannot have: it says so in its own way
        verdict = None
    if verdict is None or verdict.path == "logits":
        verdict, attention = check(small)
    use_attention(module.inner, attention)
    module.path, module.not_packed = verdict.path, verdict.reason
    return verdict


def _miniature(kind: type[Any], config: Any) -> nn.Module:
    """With weights so wide that a mistake shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = kind._from_config(copy.deepcopy(config), dtype=torch.float32)
        for parameter in small.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return small


def shallow(config: Any) -> Any:
    """With few layers, every kind of layer among them, and few tokens."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers, kinds = text.num_hidden_layers, getattr(text, "layer_types", None) or []
    kept = min(layers, max([LAYERS, *(kinds.index(kind) + 1 for kind in kinds)]))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for part in (config, text):
        if (getattr(part, "pad_token_id", None) or 0) >= text.vocab_size:
            part.pad_token_id = 0
    return config


def narrow(config: Any) -> Any:
    """With few heads, each as wide as it was, and all other widths in proportion; with few experts."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    width, heads = text.hidden_size, text.num_attention_heads
    shared = next((name for name in KEY_VALUE_HEADS if getattr(text, name, None)), None)
    groups = getattr(text, shared) if shared else heads
    kept_groups = min(groups, HEADS)
    kept = kept_groups * min(heads // groups, HEADS)
    for name, value in list(vars(text).items()):
        if name in AS_WIDE and value == width:
            setattr(text, name, width * kept // heads)
        elif name.endswith(INNER) and isinstance(value, int):
            setattr(text, name, min(value, INNER_STEP * math.ceil(value * kept / heads / INNER_STEP)))
        elif name in OF_EXPERTS and isinstance(value, int):
            setattr(text, name, min(value, max(EXPERTS, 2 * (getattr(text, "num_experts_per_tok", None) or 1))))
    if shared:
        setattr(text, shared, kept_groups)
    text.hidden_size, text.num_attention_heads = width * kept // heads, kept
    return config
