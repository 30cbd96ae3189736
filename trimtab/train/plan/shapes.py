"""Models that can be planned by their size alone: `70B` is a Llama of that size, of which no file is needed."""

import json
from pathlib import Path

_LLAMA_2 = {"vocab_size": 32_000, "max_position_embeddings": 4096}
_SIZES = {  # width, width of the feed-forward part, layers, heads, heads of keys and values
    "7B": (4096, 11_008, 32, 32, 32),
    "8B": (4096, 14_336, 32, 32, 8),
    "13B": (5120, 13_824, 40, 40, 40),
    "34B": (8192, 22_016, 48, 64, 8),
    "70B": (8192, 28_672, 80, 64, 8),
}
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
NAMES = tuple(_SIZES)


def written(name: str, folder: Path) -> str:
    """A folder with the config.json of this shape."""
    shape = dict(zip(_NAMES, _SIZES[name])) | _LLAMA_2
    if name == "8B":  # Llama 3's vocabulary
        shape["vocab_size"] = 128_256
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, **shape}
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)
