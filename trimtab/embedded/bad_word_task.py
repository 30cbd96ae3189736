"""Two words of two hundred, four of which are bad and rare: RePULSe's toy experiment without a download.

A Llama of one layer with random weights says two words after a prompt. An answer is worth the mean of its words' worth,
between 0 and 1, or -3 if one of them is bad. How likely that is can be summed exactly.

    python -m trimtab.embedded.bad_word_task FOLDER     writes model/, prompts.jsonl and reward.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

BAD_WORDS = ("bad0", "bad1", "bad2", "bad3")
WORDS = ("<pad>", "<eos>", *BAD_WORDS, *(f"word{number}" for number in range(194)))
BAD_TOKENS = tuple(WORDS.index(word) for word in BAD_WORDS)
PROMPT = "word7"
REWARD = '''"""A reward for --remote_rm_url: what the words of an answer are worth."""


def worth(word):
    return (37 * int(word.removeprefix("word")) % 101) / 100 if word.startswith("word") else 0.0


def reward_func(queries, prompts, labels):
    answers = [query.removeprefix(prompt).split() for query, prompt in zip(queries, prompts)]
    return [
        -3.0 if any(word.startswith("bad") for word in words) else sum(map(worth, words)) / max(1, len(words))
        for words in answers
    ]
'''


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, with a space before each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.Sequence(
        [decoders.Replace("word", " word"), decoders.Replace("bad", " bad"), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def make_model(seed: int = 0) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 0.2)
    return model


def write(folder: Path) -> None:
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    (folder / "reward.py").write_text(REWARD)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m trimtab.embedded.bad_word_task FOLDER")
    write(Path(sys.argv[1]))
