"""`rg:NAME`: a generator of reasoning-gym, as in `rg:basic_arithmetic?max_terms=2`. One turn: a question, and an answer
between marks that the generator scores. An entry is known by the generator's seed and size (some draw all at once)
and its place, and made again from these."""

import functools
from typing import Any

from trimtab.envs.loaded import About, Loaded
from trimtab.envs.shapes.adapted import Adapted, Later, number
from trimtab.envs.shapes.chance import SEEDS, Chance
from trimtab.envs.sources.named import library, split, unknown
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.errors import UserError

ASKED = "\n\nGive your final answer between <answer> and </answer>."
OPEN, SHUT = "<answer>", "</answer>"


def load(place: str) -> Loaded:
    name, options = split(place)
    source = f"rg:{place}"
    library("reasoning_gym", "reasoning-gym", source)
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise unknown(source, name, sorted(DATASETS))

    @functools.lru_cache(8)
    def generator(seed: int, size: int) -> Any:
        return create_dataset(name, **options, seed=seed, size=size)

    try:
        generator(0, 1)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"--environment {source}: {' '.join(str(error).split())}") from error

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        known = [{"seed": seed % SEEDS, "size": count, "entry": place} for place in range(count)]
        entries = [Question(generator).entry(**columns) for columns in known]
        return [
            {"prompt": asked(entry), "label": str(entry["answer"]), **columns} for entry, columns in zip(entries, known)
        ]

    return Loaded(About(name, "reasoning-gym's", offers_rows=True), lambda: Question(generator), rows=rows)


def asked(entry: dict[str, Any]) -> list[Message]:
    return [{"role": "user", "content": entry["question"] + ASKED}]


class Question(Adapted):
    def __init__(self, generator: Any):
        self._generator, self._chance = generator, Chance()

    def reset(self, task: Task) -> Later[list[Message] | None]:
        offered = [task.columns[name] for name in ("seed", "size", "entry") if name in task.columns]
        return asked(self.entry(*(offered if len(offered) == 3 else (task.seed % SEEDS, 1, 0))))

    def entry(self, seed: int, size: int, entry: int) -> dict[str, Any]:
        self._chance.seed(seed)
        self._made = self._chance.of(self._generator, seed, size)
        self._entry: dict[str, Any] = self._chance.of(self._made.__getitem__, entry)
        return self._entry

    def step(self, turn: Turn) -> Later[Step]:
        score = self._made.score_answer(answer(turn.text), self._entry)
        return Step(reward=number(score, "the score"), done=True)


def answer(text: str) -> str | None:
    """What stands in the last pair of marks."""
    _, opened, rest = text.rpartition(OPEN)
    inside, shut, _ = rest.partition(SHUT)
    return inside.strip() if opened and shut else None
