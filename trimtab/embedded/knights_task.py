"""Knights and knaves made from a seed: puzzles with one solution each, and a tiny model that half knows how to answer.

Each of a few people makes a claim; a knight's is true, a knave's false. Claims are drawn until one assignment alone
fits. The rows have the columns of the public sets (quiz, names, solution, solution_text_format), in words of our own.

The model is there to see rewards rise within seconds: its tokens are whole phrases, all that it does not know is one
token, and its weights are a table of which phrase follows which. So its answers have the asked form now and then, and
who is what is a guess.

    python -m trimtab.embedded.knights_task FOLDER
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trimtab.embedded.sort_task import phrase_tokenizer, teach_bigrams, word_llama, write_model, write_rows

NAMES = ("Ada", "Bela", "Carl", "Dora", "Emil", "Fay")
TRAIN_ROWS, TEST_ROWS = 900, 100

Roles = Sequence[bool]
Claim = Callable[[Roles], bool]


def make_puzzles(count: int, seed: int, people: int = 3) -> list[dict]:
    numbers = random.Random(seed)
    return [_puzzle(numbers, people) for _ in range(count)]


def write(folder: str | Path, *, train: int = TRAIN_ROWS, test: int = TEST_ROWS, people: int = 3) -> Path:
    """Write train.jsonl, test.jsonl and the model `model` into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", make_puzzles(train, 0, people)), ("test", make_puzzles(test, 1, people))):
        write_rows(folder / f"{name}.jsonl", rows)
    write_model(folder / "model", *make_model())
    return folder


def _puzzle(numbers: random.Random, people: int) -> dict:
    names = numbers.sample(NAMES, people)
    while True:
        claims = [_claim(numbers, names, speaker) for speaker in range(people)]
        fitting = [roles for roles in itertools.product((True, False), repeat=people) if _fits(roles, claims)]
        if len(fitting) == 1:
            break
    (roles,) = fitting
    said = " ".join(f'{name} says: "{words}".' for name, (words, _) in zip(names, claims))
    met = f"{', '.join(names[:-1])} and {names[-1]}"
    quiz = f"Here knights speak only truths and knaves only lies. You meet {met}. {said} Who is a knight, who a knave?"
    lines = [f"({place}) {_judged(name, role)}" for place, (name, role) in enumerate(zip(names, roles), start=1)]
    return {"quiz": quiz, "names": names, "solution": list(roles), "solution_text_format": "\n".join(lines)}


def _fits(roles: Roles, claims: Sequence[tuple[str, Claim]]) -> bool:
    return all(claim(roles) == role for role, (_, claim) in zip(roles, claims))


def _claim(numbers: random.Random, names: Sequence[str], speaker: int) -> tuple[str, Claim]:
    """What somebody says of another, or of another and one more: in words, and as a function of the roles."""
    first = numbers.choice([person for person in range(len(names)) if person != speaker])
    second = numbers.choice([person for person in range(len(names)) if person != first])
    this, that = numbers.random() < 0.5, numbers.random() < 0.5
    a, b = _judged(names[first], this), _judged(names[second], that)
    forms: list[tuple[str, Claim]] = [
        (a, lambda roles: roles[first] == this),
        (f"{a} and {b}", lambda roles: roles[first] == this and roles[second] == that),
        (f"{a} or {b}", lambda roles: roles[first] == this or roles[second] == that),
        (f"if {a} then {b}", lambda roles: roles[first] != this or roles[second] == that),
        (f"{a} exactly if {b}", lambda roles: (roles[first] == this) == (roles[second] == that)),
    ]
    return numbers.choice(forms)


def _judged(name: str, knight: bool) -> str:
    return f"{name} is a {'knight' if knight else 'knave'}"


# ---- the model

SPECIAL = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
OPENED, CLOSED, ANSWER, END = "<think>", "</think>", "<answer>", "</answer>"
PLACES = ("(1) ", "(2) ", "(3) ")
KNIGHT, KNAVE, LINE_END, THOUGHT = " is a knight", " is a knave", "\n", " so "
PHRASES = (OPENED, CLOSED, ANSWER, END, *PLACES, *NAMES, KNIGHT, KNAVE, LINE_END, THOUGHT)
LOGIT = 5.0  # of what may follow


def _follows() -> Iterator[tuple[str, str]]:
    yield from ((OPENED, THOUGHT), (OPENED, CLOSED), (THOUGHT, THOUGHT), (THOUGHT, CLOSED), (CLOSED, ANSWER))
    yield from ((ANSWER, place) for place in PLACES)
    yield from itertools.product(PLACES, NAMES)
    yield from itertools.product(NAMES, (KNIGHT, KNAVE))
    yield from ((role, after) for role in (KNIGHT, KNAVE) for after in (LINE_END, END))
    yield from ((LINE_END, place) for place in PLACES)
    yield (END, "<eos>")


def make_model(seed: int = 0):
    """A Llama of 20 thousand parameters and its tokenizer."""
    words = [*SPECIAL, *PHRASES]
    tokenizer = phrase_tokenizer(words, PHRASES, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    model = word_llama(words, seed, width=32, inner=64, layers=2, positions=512, num_key_value_heads=2)
    teach_bigrams(model, words, _follows(), LOGIT)
    return model, tokenizer


if __name__ == "__main__":
    write(sys.argv[1])
