"""A game of guesses, `--environment trimtab:guess`, and a model that knows its words and not how to play.

    user       Find my number from 1 to 7 in 3 guesses.
    assistant  4
    user       higher
    assistant  6

Three guesses tell seven numbers apart if each is the middle of what is left: random guesses find three of seven.

The model's tokens are whole phrases, and its weights say that after <assistant> comes a number and then the end. Which
number, it has to find out by playing.

    python -m trimtab.embedded.guess_game FOLDER     writes model/, prompts.jsonl and test.jsonl
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.embedded.sort_task import (
    CHAT_TEMPLATE,
    phrase_tokenizer,
    teach_bigrams,
    word_llama,
    write_model,
    write_rows,
)
from trimtab.envs.types import Step, Task, Turn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HIGHEST, TRIES = 7, 3
OPENING = f"Find my number from 1 to {HIGHEST} in {TRIES} guesses."
HIGHER, LOWER, UNREADABLE = "higher", "lower", "only a number, please"
TRAIN_ROWS, TEST_ROWS = 4_096, 128


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """The same question in every row; the label is the number."""
    numbers = random.Random(f"guess {seed}")
    return [{"prompt": OPENING, "label": str(numbers.randint(1, HIGHEST))} for _ in range(count)]


class Guess:
    """The environment. Without a label the number comes from the task's seed."""

    def reset(self, task: Task) -> str:
        self.number = random.Random(task.seed).randint(1, HIGHEST) if task.label is None else int(task.label)
        return OPENING

    def step(self, turn: Turn) -> Step:
        said = turn.text.strip()
        guess = int(said) if said.isascii() and said.isdigit() else None
        if guess == self.number:
            return Step(reward=1.0, done=True)
        if turn.number + 1 == TRIES:
            return Step(done=True)
        if guess is None:
            return Step(UNREADABLE)
        return Step(HIGHER if guess < self.number else LOWER)

    def close(self) -> None: ...


# ---- the model

NUMBERS = tuple(str(number) for number in range(1, HIGHEST + 1))
PHRASES = (OPENING, HIGHER, LOWER, UNREADABLE, *NUMBERS)
WORDS = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", *PHRASES)
LOGIT = 4.0  # of a number after <assistant>, and of the end after a number


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a phrase."""
    return phrase_tokenizer(
        WORDS,
        PHRASES,
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=64,
    )


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama of 84 thousand parameters whose first guess is any number."""
    # Heads of 32 are what the attention of vLLM on a CPU takes.
    model = word_llama(WORDS, seed, width=64, inner=128, layers=2, positions=64, heads=2)
    teach_bigrams(model, WORDS, (pair for n in NUMBERS for pair in (("<assistant>", n), (n, "<eos>"))), LOGIT)
    return model.eval()


def write(folder: str | Path, seed: int = 0, train_rows: int = TRAIN_ROWS, test_rows: int = TEST_ROWS) -> Path:
    """Write `model/`, `prompts.jsonl` and `test.jsonl` into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", make_model(seed), make_tokenizer())
    write_rows(folder / "prompts.jsonl", rows(train_rows, seed))
    write_rows(folder / "test.jsonl", rows(test_rows, seed + 1))
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m trimtab.embedded.guess_game FOLDER")
    write(sys.argv[1])
