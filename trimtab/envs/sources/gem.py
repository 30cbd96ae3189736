"""`gem:NAME`: an environment of GEM's registry, as in `gem:game:GuessTheNumber-v0?max_turns=6`. Its rows are episodes:
a seed each, and what the environment says first."""

import random
from typing import Any

from trimtab.envs.loaded import About, Loaded
from trimtab.envs.shapes.chance import SEEDS, Chance
from trimtab.envs.shapes.gymnasium import Gymnasium
from trimtab.envs.sources.named import library, split, unknown
from trimtab.envs.types import Message, Task

WAITING = ("code:", "qa:", "math:", "mcp")
"""Those that start programs or ask somebody else: their episodes must not take turns."""


def load(place: str) -> Loaded:
    name, options = split(place)
    source = f"gem:{place}"
    gem = library("gem", "gem-llm", source)
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        raise unknown(source, name, list(ENV_REGISTRY))

    def make() -> Episode:
        return Episode(lambda: gem.make(name, **options), None if name.startswith(WAITING) else Chance())

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        seeds = random.Random(seed)
        # Each of its own: some remember how often they were reset.
        return [make().row(seeds.randrange(SEEDS)) for _ in range(count)]

    return Loaded(About(name, "GEM's", offers_rows=True), make, rows=rows)


class Episode(Gymnasium):
    def reset(self, task: Task) -> Any:
        """By the row's seed, where it is one of those that were offered."""
        return super().reset(seeded(task))

    def row(self, seed: int) -> dict[str, Any]:
        said: list[Message] = super().reset(Task(0, 0, seed))  # type: ignore[assignment]  # GEM has no coroutines
        return {"prompt": said, "seed": seed}


def seeded(task: Task) -> Task:
    seed = task.columns.get("seed")
    return (
        task if not isinstance(seed, int) else Task(task.row, task.sample, seed, task.prompt, task.label, task.columns)
    )
