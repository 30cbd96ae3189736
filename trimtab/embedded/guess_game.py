"""A model for the game `trimtab:guess` that knows its words and not how to play.

    user       Find my number from 1 to 7 in 3 guesses.
    assistant  4
    user       higher
    assistant  6

Its tokens are whole phrases, and its weights say that after <assistant> comes a number and then the end. Which number,
it has to find out by playing.

    python -m trimtab.embedded.guess_game FOLDER     writes model/, prompts.jsonl and test.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.embedded.environments.guess import HIGHER, HIGHEST, LOWER, OPENING, UNREADABLE, rows
from trimtab.embedded.sort_task import CHAT_TEMPLATE
from trimtab.embedded.word_model import word_llama, word_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = tuple(str(number) for number in range(1, HIGHEST + 1))
PHRASES = (OPENING, HIGHER, LOWER, UNREADABLE, *NUMBERS)
WORDS = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", *PHRASES)
SURENESS = 4.0  # logit of what may follow, where everything else has about 0
TRAIN_ROWS, TEST_ROWS = 4_096, 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a phrase."""
    from tokenizers import Regex, decoders, pre_tokenizers

    return word_tokenizer(
        WORDS,
        pre_tokenizers.Split(Regex("|".join(map(re.escape, PHRASES))), behavior="isolated"),
        decoders.Fuse(),
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama of 84 thousand parameters whose first guess is any number."""
    import torch

    # Heads of 32 are what the attention of vLLM on a CPU takes.
    model = word_llama(WORDS, seed, width=64, inner=128, layers=2, positions=64, heads=2)
    with torch.no_grad():
        # A phrase is a direction of its own, which the norm before the head makes as long as the root of the width.
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding += torch.eye(*embedding.shape)
        for number in NUMBERS:
            for before, after in (("<assistant>", number), (number, "<eos>")):
                head[WORDS.index(after), WORDS.index(before)] += SURENESS / model.config.hidden_size**0.5
    return model.eval()


def write(folder: str | Path, seed: int = 0, train_rows: int = TRAIN_ROWS, test_rows: int = TEST_ROWS) -> Path:
    """Write `model/`, `prompts.jsonl` and `test.jsonl` into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    make_model(seed).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    for name, count, of in (("prompts", train_rows, seed), ("test", test_rows, seed + 1)):
        lines = [json.dumps(row) + "\n" for row in rows(count, of)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m trimtab.embedded.guess_game FOLDER")
    write(sys.argv[1])
