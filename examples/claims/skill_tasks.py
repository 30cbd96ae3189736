"""Tasks of reasoning-gym that a small model can almost do, with solutions to show it, and what counts as right.

A row has the `prompt`, the `label` (the right answer) and a `solution`: the steps, and the answer in a last line
`Answer: ...`. Right is what stands in that line and nothing else; how it is spelt (commas, brackets, quotes, 14 or
14.0) does not matter. The task `digits` needs no reasoning-gym, and is there to try the scripts.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

MARK = "Answer:"
INSTRUCTION = f"Think in short steps. End with a line '{MARK} ' and the answer."


@dataclass(frozen=True)
class Task:
    name: str
    """Of the data set in reasoning-gym."""
    steps: Callable[[dict[str, Any]], str]
    """What a solution says before its answer."""
    options: dict[str, Any] = field(default_factory=dict)
    longest: int = 64
    """Tokens that an answer may have."""


def sums(metadata: dict[str, Any]) -> str:
    words = metadata["expression"].split()
    total, lines = int(words[0]), []
    for sign, term in zip(words[1::2], words[2::2]):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return "\n".join(lines)


def products(metadata: dict[str, Any]) -> str:
    a, b = (int(word) for word in metadata["expression"].split(" * "))
    tens, ones = b - b % 10, b % 10
    return f"{a} * {tens} = {a * tens}\n{a} * {ones} = {a * ones}\n{a * tens} + {a * ones} = {a * b}"


def letters(metadata: dict[str, Any]) -> str:
    letter = metadata["target_letter"].lower()
    return ", ".join(f"{word} {word.lower().count(letter)}" for word in metadata["span"])


def backward(metadata: dict[str, Any]) -> str:
    return " ".join(metadata["word"]) + "\n" + " ".join(reversed(metadata["word"]))


def euclid(metadata: dict[str, Any]) -> str:
    a, b = metadata["numbers"]
    lines = []
    while b:
        lines.append(f"{a} mod {b} = {a % b}")
        a, b = b, a % b
    return "\n".join(lines)


def legs(metadata: dict[str, Any]) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    parts = [(count, name, count * ANIMALS[name]) for name, count in metadata["animals"].items()]
    each = ", ".join(f"{count} {name} {total}" for count, name, total in parts)
    return f"{each}\n{' + '.join(str(total) for *_, total in parts)}"


def knights(metadata: dict[str, Any]) -> str:
    """Every assignment in turn: a statement must be true if and only if who says it is a knight."""
    words = metadata["knight_knave_terms"]
    lines = []
    for assignment in product((True, False), repeat=len(metadata["names"])):
        who = ", ".join(words["knight"] if one else words["knave"] for one in assignment)
        said = [_holds(statement, assignment) for statement in metadata["statements"]]
        fits = all(true == one for true, one in zip(said, assignment))
        lines.append(f"{who}: {', '.join('true' if one else 'false' for one in said)}; {'yes' if fits else 'no'}")
    return "\n".join(lines)


def _holds(statement: Any, knights: tuple[bool, ...]) -> bool:
    kind, *parts = statement
    if kind in ("telling-truth", "lying"):
        return knights[parts[0]] == (kind == "telling-truth")
    truths = [_holds(part, knights) for part in parts]
    if kind == "not":
        return not truths[0]
    if kind == "->":
        return truths[1] or not truths[0]
    if kind == "<=>":
        return truths[0] == truths[1]
    return {"and": all, "or": any}[kind](truths)


TASKS = {
    "sums": Task("chain_sum", sums, {"min_terms": 3, "max_terms": 4, "min_digits": 2, "max_digits": 2}),
    "short_sums": Task("chain_sum", sums, {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
    "products": Task("products", products, {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    "sorting": Task("number_sorting", lambda _: "", {"min_numbers": 4, "max_numbers": 5, "max_decimals": 0}),
    "letters": Task("letter_counting", letters, {"min_words": 3, "max_words": 5}),
    "backward": Task("spell_backward", backward, {"min_word_len": 4, "max_word_len": 6}),
    "gcd": Task("gcd", euclid, {"max_numbers": 2, "max_value": 100}, longest=96),
    "legs": Task("leg_counting", legs, {"min_animals": 2, "max_animals": 3, "max_instances": 5}),
    "knights": Task(
        "knights_knaves", knights, {"n_people": 2, "depth_constraint": 2, "width_constraint": 2}, longest=96
    ),
    "digits": Task("", lambda _: "", longest=16),
}


def rows(task: str, count: int, seed: int, without: set[str] | None = None) -> list[dict[str, str]]:
    """Rows of which no two have the same prompt, and none one of `without`."""
    asked = set(without or ())
    found: list[dict[str, str]] = []
    for question, label, metadata in _entries(TASKS[task], 4 * count, seed):
        prompt = f"{question.strip()}\n{INSTRUCTION}"
        if prompt in asked:
            continue
        asked.add(prompt)
        solution = f"{TASKS[task].steps(metadata)}\n{MARK} {label}".lstrip()
        found.append({"prompt": prompt, "label": label, "solution": solution})
        if len(found) == count:
            return found
    raise SystemExit(f"{task}: {len(found)} different questions, {count} are wanted: ask for fewer, or widen the task")


def _entries(task: Task, count: int, seed: int):
    if not task.name:
        drawn = random.Random(seed)
        for _ in range(count):
            number = str(drawn.randrange(100, 1000))
            yield f"sort {number}", "".join(sorted(number)), {}
        return
    try:
        import reasoning_gym
    except ImportError as error:
        raise SystemExit(f"{task.name}: {error}; pip install 'trimtab[reasoning-gym]'") from None
    # Entry i of seed s is entry 0 of seed s + i there.
    for entry in reasoning_gym.create_dataset(task.name, size=count, seed=1_000_000 * (seed + 1), **task.options):
        yield entry["question"], entry["answer"], entry["metadata"]


def parsed(text: str) -> list[str] | None:
    """The words of the answer line; None if there is none."""
    _, mark, after = text.rpartition(MARK)
    words = normalised(after.strip().split("\n")[0]) if mark else []
    return words or None


def is_right(text: str, label: str) -> bool:
    return parsed(text) == normalised(label)


def is_right_at_the_end(text: str, label: str) -> bool:
    """Whatever the form: the right answer is the last that is said."""
    wanted = normalised(label)
    return normalised(text)[-len(wanted) :] == wanted


def normalised(text: str) -> list[str]:
    words = [word.strip(".:;") for word in re.sub(r"[,\[\]'\"*()${}\\]", " ", text.lower()).split()]
    return [_number(word) for word in words if word]


def _number(word: str) -> str:
    try:
        return f"{float(word):.15g}"
    except ValueError:
        return word
