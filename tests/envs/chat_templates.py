"""Tokenizers for chat templates: byte-level, with every special token that a template names."""

import re

from transformers import PreTrainedTokenizerFast

from tests.byte_tokenizer import byte_tokenizer

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
    marks = {"eos_token": eos, "bos_token": "<s>", "pad_token": "<pad>", "clean_up_tokenization_spaces": False}
    texts = ["The quick brown fox answers: yes, it is four. user assistant"] * 3
    tokenizer = byte_tokenizer(texts, special, 400, **marks)
    tokenizer.chat_template = template
    return tokenizer
