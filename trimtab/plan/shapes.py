"""Models that can be planned by their size alone: `70B` is a Llama of that size, of which no file is needed."""

import json
from pathlib import Path
from typing import Any

_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
_SIZES = {  # width, width of the feed-forward part, layers, heads, heads of keys and values, words
    "7B": (4096, 11_008, 32, 32, 32, 32_000),
    "8B": (4096, 14_336, 32, 32, 8, 128_256),
    "13B": (5120, 13_824, 40, 40, 40, 32_000),
    "34B": (8192, 22_016, 48, 64, 8, 32_000),
    "70B": (8192, 28_672, 80, 64, 8, 32_000),
    "405B": (16_384, 53_248, 126, 128, 8, 128_256),
}
_MIXTURES = {  # the same of Mixtrals: 8 experts, of which a token goes to 2
    "8x7B": (4096, 14_336, 32, 32, 8, 32_000),
    "8x22B": (6144, 16_384, 56, 48, 8, 32_768),
}
NAMES = (*_SIZES, *_MIXTURES)
LONGEST = 131_072  # positions: more than any of them, so that long rows can be planned


def written(name: str, folder: Path) -> str:
    """A folder with the config.json of this shape."""
    config: dict[str, Any] = {"tie_word_embeddings": False, "max_position_embeddings": LONGEST}
    if name in _SIZES:
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | dict(zip(_NAMES, _SIZES[name]))
    else:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config |= dict(zip(_NAMES, _MIXTURES[name])) | {"num_local_experts": 8, "num_experts_per_tok": 2}
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)
