"""The self-check for a model whose weights nobody holds: on a copy of its configuration with a few layers.

Which path is right, and how often attention is called, depends on the code and not on weights.
"""

import copy
from typing import Any

import torch
from torch import nn

from trimtab.models.packed import PackedModel
from trimtab.models.selfcheck import Verdict, choose_path, use_attention

LAYERS, VOCABULARY = 2, 1024


def choose_path_without_weights(
    module: PackedModel, *, packed_allowed: bool, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """Decide the path of a skeleton, and set it up for it. `dtype`, `device`: where it will work."""
    root = type(module)(_miniature(module.inner)).to(device)
    for parameter in root.parameters():
        parameter.data = parameter.data.to(dtype)
    verdict = choose_path(root, packed_allowed=packed_allowed)
    use_attention(module.inner, root.config._attn_implementation)
    module.path = verdict.path
    return verdict


def _miniature(model: nn.Module) -> nn.Module:
    """The same kind of model, small and with weights so wide that a mistake shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = type(model)._from_config(_small(model.config), dtype=torch.float32)
        for parameter in small.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return small


def _small(config: Any) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers, kinds = text.num_hidden_layers, getattr(text, "layer_types", None) or []
    # Every kind of layer is there once.
    kept = min(layers, max(LAYERS, *(kinds.index(kind) + 1 for kind in kinds), LAYERS))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for part in (config, text):
        if (part.pad_token_id or 0) >= text.vocab_size:
            part.pad_token_id = 0
    return config
