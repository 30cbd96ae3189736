"""A number is to be found in three guesses, and after each one the world says whether it is higher or lower.

Seven numbers can be told apart by three guesses, but only if each is the middle of what is left: whoever guesses at
random finds three of seven, whoever listens finds all.
"""

import random
from typing import Any

from trimtab.envs.types import Step, Task, Turn

HIGHEST, TRIES = 7, 3
OPENING = f"Find my number from 1 to {HIGHEST} in {TRIES} guesses."
HIGHER, LOWER, UNREADABLE = "higher", "lower", "only a number, please"


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """What is asked is always the same; the label is the number."""
    numbers = random.Random(f"guess {seed}")
    return [{"prompt": OPENING, "label": str(numbers.randint(1, HIGHEST))} for _ in range(count)]


class Guess:
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
