"""Tokenizers for chat templates: byte-level, with every special token that a template names."""

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NAMES = re.compile(
    r"<[|｜][^<>'\"]*?[|｜]?>|<(?:start_of_turn|end_of_turn|bos|eos|end_of_utterance)>|<[a-z_]+\|>|\[/?[A-Z_]+\]"
)
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>", "<|end|>", "<｜end▁of▁sentence｜>", "<turn|>"),
    *("<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|eot|>", "<|user|>", "</s>"),
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}},
            "required": ["a"],
        },
    },
}


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """Its EOS token is what ends a turn there."""
    eos = next((end for end in ENDS if end in (template or "")), "</s>")
    special = sorted({*NAMES.findall(template or ""), "<pad>", "<s>", "</s>", eos})
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["The quick brown fox answers: yes, it is four. user assistant"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token="<s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer
