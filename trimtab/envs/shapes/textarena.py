"""TextArena's shape: `reset(num_players, seed)`, `get_observation()`, `step(action)` gives `(done, info)`, `close()`
what each player has won. Games of one player are played; what others say in between is the game's business."""

from typing import Any

from trimtab.envs.shapes.adapted import Adapted, Later, Maker, figures, has, named, number
from trimtab.envs.shapes.chance import SEEDS, Chance
from trimtab.envs.types import Message, Step, Task, Turn

WORDS = "reset(num_players, seed), get_observation(), step(action) of two values (TextArena)"


def fits(candidate: Any) -> bool:
    return has(candidate, "reset", "step", "get_observation")


class TextArena(Adapted):
    def __init__(self, maker: Maker):
        self._chance = Chance()  # its games draw from the process's generators
        self._own = self._chance.of(maker)
        self._player = 0
        self._open = False

    def reset(self, task: Task) -> Later[list[Message] | None]:
        self._chance.seed(task.seed)
        self._open = True
        self._chance.of(self._own.reset, num_players=1, seed=task.seed % SEEDS)
        return [{"role": "user", "content": self._observed()}]

    def step(self, turn: Turn) -> Later[Step]:
        found = self._chance.of(self._own.step, action=turn.text)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"step gave {named(found)}: done and info are needed")
        done, info = found
        if not done:
            return Step([{"role": "user", "content": self._observed()}], logs=figures(info))
        return Step(reward=self._closed(), done=True, logs=figures(info))

    def close(self) -> Later[None]:
        if self._open:
            self._own.close()
        return None

    def _observed(self) -> str:
        """What was said since the last time, less what the player said."""
        self._player, found = self._own.get_observation()
        if isinstance(found, str):
            return found
        return "\n".join(str(said[1]) for said in found if said[0] != self._player)

    def _closed(self) -> float:
        self._open = False
        found = self._own.close()
        rewards = found[0] if isinstance(found, tuple) else found
        if not isinstance(rewards, dict) or self._player not in rewards:
            raise TypeError(f"close gave {named(found)}: a dict of players and their rewards is needed")
        return number(rewards[self._player], f"the reward of player {self._player}")
