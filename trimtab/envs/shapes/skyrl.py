"""SkyRL's shape (`BaseTextEnv`): made from the row (`extras`), `init(prompt)` gives messages and a dict, `step(action)`
a dict of observations, reward, done and metadata; `get_metrics()` at the end."""

from collections.abc import Mapping
from typing import Any

from trimtab.envs.shapes.adapted import Adapted, Later, Maker, accepted, figures, has, messages_of, named, number, then
from trimtab.envs.types import Message, Step, Task, Turn

WORDS = "init(prompt), step(action) of a dict (SkyRL)"


def fits(candidate: Any) -> bool:
    return has(candidate, "init", "step")


class SkyRL(Adapted):
    def __init__(self, maker: Maker):
        self._maker = maker
        self._own: Any = None

    def reset(self, task: Task) -> Later[list[Message] | None]:
        extras = {"reward_spec": {"method": "rule", "ground_truth": task.label}} | task.columns
        self._own = self._maker(**accepted(self._maker, {"env_config": {}, "extras": extras}))
        prompt = messages_of(task.prompt, "the prompt")
        return then(self._own.init(prompt), lambda found: _opening(prompt, found))

    def step(self, turn: Turn) -> Later[Step]:
        return then(self._own.step(turn.text), self._step)

    def close(self) -> Later[None]:
        return None if self._own is None else then(self._own.close(), lambda found: None)

    def _step(self, found: Any) -> Step:
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= found.keys():
            raise TypeError(f"step gave {named(found)}: a dict with observations, reward and done is needed")
        done = bool(found["done"])
        logs = figures(found.get("metadata"))
        if done and has(self._own, "get_metrics"):
            logs |= figures(self._own.get_metrics())
        said = messages_of(found["observations"], "observations")
        return Step(said, number(found["reward"], "reward"), done, logs=logs)


def _opening(prompt: list[Message], found: Any) -> list[Message] | None:
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(f"init gave {named(found)}: messages and a dict are needed")
    said = messages_of(found[0], "what init gave")
    return None if said == prompt else said
