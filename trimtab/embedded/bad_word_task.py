"""Two words of two hundred, four of which are bad and rare: RePULSe's toy experiment without a download.

A Llama of one layer with random weights says two words after a prompt. An answer is worth the mean of its words' worth,
between 0 and 1, or -3 if one of them is bad. How likely that is can be summed exactly.

    python -m trimtab.embedded.bad_word_task FOLDER     writes model/, prompts.jsonl and reward.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.embedded.sort_task import word_llama, word_tokenizer, write_model, write_rows

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
    from tokenizers import decoders, pre_tokenizers

    joined = decoders.Sequence([decoders.Replace("word", " word"), decoders.Replace("bad", " bad"), decoders.Fuse()])
    return word_tokenizer(WORDS, pre_tokenizers.WhitespaceSplit(), joined, unknown="<pad>")


def make_model(seed: int = 0) -> LlamaForCausalLM:
    return word_llama(WORDS, seed, width=32, inner=64, layers=1, positions=64, spread=0.2)


def write(folder: Path) -> None:
    write_model(folder / "model", make_model(), make_tokenizer())
    write_rows(folder / "prompts.jsonl", [{"prompt": PROMPT}])
    (folder / "reward.py").write_text(REWARD)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m trimtab.embedded.bad_word_task FOLDER")
    write(Path(sys.argv[1]))
