"""The models that are measured: Llamas of known shapes and other families, random bf16 weights, and a tokenizer whose
words are tokens.

A random model hardly ever stops, so nearly all answers reach their longest length: the kindest case for padded peers.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 49_152
    tie_word_embeddings: bool = True

    def config(self, **more) -> LlamaConfig:
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return LlamaConfig(**asdict(self), max_position_embeddings=32_768, **special, dtype=torch.bfloat16, **more)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices; the head's are `head_weights`."""
        keys = self.num_key_value_heads * self.head_size
        attention = self.hidden_size * (2 * self.hidden_size + 2 * keys)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in bf16."""
        return 4 * self.num_hidden_layers * self.num_key_value_heads * self.head_size


SHAPES = {
    "135M": Shape(576, 30, 9, 3, 1536),
    "360M": Shape(960, 32, 15, 5, 2560),
    "1.7B": Shape(2048, 24, 32, 32, 8192),
    "8B": Shape(4096, 32, 32, 8, 14_336, 128_256, False),
}
TINY = Shape(64, 2, 4, 2, 128, 512)

QWEN = {"vocab_size": 151_936, "tie_word_embeddings": True}
FAMILIES: dict[str, dict] = {
    "qwen2": QWEN | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                     "intermediate_size": 4864},
    "qwen3": QWEN | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                     "intermediate_size": 3072, "head_dim": 128},
    # Qwen3-30B-A3B has 48 layers
    "qwen3_moe": QWEN | {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 32,
                         "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                         "moe_intermediate_size": 768, "norm_topk_prob": True},
    # Qwen3.5-4B: three layers of four have Gated DeltaNet
    "qwen3_5_text": {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
                     "intermediate_size": 9216, "vocab_size": 248_320, "tie_word_embeddings": True},
    # gpt-oss-20b has 24 layers
    "gpt_oss": {"num_hidden_layers": 6, "num_local_experts": 32},
    # DeepSeek-V2-Lite has 27 layers
    "deepseek_v2": {"hidden_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 16,
                    "intermediate_size": 10_944, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
                    "q_lora_rank": None, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
                    "max_position_embeddings": 32_768},
}  # fmt: skip
"""Sizes by transformers' model type."""


def make_family(name: str, device: torch.device, **other: int) -> torch.nn.Module:
    """`other`: sizes that are others than the table's."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, **FAMILIES[name] | special | other)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_model(shape: Shape, device: torch.device, *, reward: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    kind = LlamaForSequenceClassification if reward else LlamaForCausalLM
    with device:
        model = kind._from_config(shape.config(**({"num_labels": 1} if reward else {})), dtype=torch.bfloat16).eval()
    for layer in model.model.layers:  # as trained ones are: no layer drowns the others, and rounding stays small
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.data /= (2 * shape.num_hidden_layers) ** 0.5
    return model


def write_model(folder: Path, shape: Shape, device: torch.device, *, reward: bool = False) -> None:
    write_tokenizer(folder, shape.vocab_size)
    make_model(shape, device, reward=reward).save_pretrained(folder)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def make_texts(count: int, tokens: int, shape: Shape, seed: int = 0) -> list[str]:
    drawn = np.random.default_rng(seed).integers(3, shape.vocab_size, (count, tokens))
    return [" ".join(f"w{i}" for i in row) for row in drawn]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
