"""A tokenizer whose tokens are the words of a list, and a small Llama for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def word_tokenizer(
    words: Sequence[str], cut: PreTokenizer, joined: Decoder, *, unknown: str = "<unk>", **how: Any
) -> PreTrainedTokenizerFast:
    """`cut` makes words of a text, `joined` a text of them; "<pad>" and "<eos>" are among the words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    core.pre_tokenizer, core.decoder = cut, joined
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token=unknown, **how
    )


def word_llama(
    words: Sequence[str],
    seed: int,
    *,
    width: int,
    inner: int,
    layers: int,
    positions: int,
    heads: int = 4,
    spread: float = 0.0,
    **how: Any,
) -> LlamaForCausalLM:
    """Random weights drawn from `seed`, matrices with the deviation `spread`, if it is not 0. The caller's random state
    is left as it was."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        pad_token_id=words.index("<pad>"),
        eos_token_id=words.index("<eos>"),
        bos_token_id=None,
        **how,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if spread and parameter.ndim >= 2:
                    parameter.normal_(0, spread)
    return model
