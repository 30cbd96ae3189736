"""Gymnasium's shape and libraries of games: GEM (`gem:NAME`), TextArena and reasoning-gym (`rg:NAME`).

Gymnasium's `reset(seed)` returns an observation and a dict, `step(action)` an observation, a reward, terminated,
truncated and a dict. The action is the turn's text. Four values are those of OpenAI's gym, which has one flag for both
kinds of end.
"""

import functools
import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trimtab.envs.adapter import (
    EnvironmentAdapter,
    EnvironmentFactory,
    EnvironmentInfo,
    LoadedEnvironment,
    MaybeAwaitable,
    R,
    accepted_arguments,
    describe,
    has_methods,
    parameters,
    required_parameters,
    then,
    to_float,
    to_messages,
    to_metrics,
    unknown_name,
)
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.errors import UserError

SEEDS = 2**31  # the generators of all libraries take seeds below this

_lock = threading.RLock()


class EpisodeRandom:
    """An episode's state of the global generators (random, and numpy's if it is loaded), for games that draw from
    these. Calls of all threads take turns, so that concurrent episodes do not change each other, and a game that is
    played again is the same."""

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    def seed(self, seed: int) -> None:
        self.call(_seed, seed % SEEDS)

    def call(self, function: Callable[..., R], *arguments: Any, **named: Any) -> R:
        """Call the function with the generators as this episode's last call left them."""
        with _lock:
            others = _get_state()
            if self._state is not None:
                _set_state(self._state)
            try:
                return function(*arguments, **named)
            finally:
                self._state = _get_state()
                _set_state(others)


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _get_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _set_state(state: tuple[Any, Any]) -> None:
    python_state, numpy_state = state
    random.setstate(python_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


# ---- Gymnasium

GYMNASIUM_SHAPE = "reset(seed), step(action) of five values (Gymnasium, GEM)"


def is_gymnasium(candidate: Any) -> bool:
    if not has_methods(candidate, "reset", "step") or len(required_parameters(candidate.step)) != 1:
        return False
    if required_parameters(candidate.reset):
        return False
    return "seed" in parameters(candidate.reset) or "action" in required_parameters(candidate.step)


class GymnasiumAdapter(EnvironmentAdapter):
    def __init__(self, factory: EnvironmentFactory, random_state: EpisodeRandom | None = None):
        """`random_state`: for an environment that draws from the global generators and does not wait for anything."""
        self._random = random_state
        self._environment = self._call(factory)

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        if self._random is not None:
            self._random.seed(task.seed)
        seed = accepted_arguments(self._environment.reset, {"seed": task.seed % SEEDS})
        return then(self._call(self._environment.reset, **seed), _first_observation)

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        return then(self._call(self._environment.step, turn.text), _gymnasium_step)

    def close(self) -> MaybeAwaitable[None]:
        method = getattr(self._environment, "close", None)
        return None if method is None else then(method(), lambda found: None)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._random is None:
            return function(*arguments, **named)
        return self._random.call(function, *arguments, **named)


def _first_observation(found: Any) -> list[Message]:
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
        return _observation_messages(*found)
    return _observation_messages(found, {})


def _gymnasium_step(found: Any) -> Step:
    if not isinstance(found, tuple | list) or len(found) not in (4, 5):
        raise TypeError(f"step gave {describe(found)}: observation, reward, terminated, truncated and info are needed")
    observation, reward, terminated, *truncated, info = found
    done = bool(terminated)
    return Step(
        _observation_messages(observation, info),
        to_float(reward, "the reward"),
        done,
        bool(truncated and truncated[0]) and not done,  # games of GEM set both when they are over
        logs=to_metrics(info),
    )


def _observation_messages(observation: Any, info: Any) -> list[Message]:
    if isinstance(observation, list) and observation and isinstance(observation[0], Mapping):
        return to_messages(observation, "the observation")
    text = str(observation)
    suffix = info.get("suffix") if isinstance(info, Mapping) else None  # GEM's: the question to the player
    if isinstance(suffix, str):
        text += suffix if text.endswith("\n") else f"\n{suffix}"
    return [{"role": "user", "content": text}]


# ---- GEM: an environment of its registry, as in gem:game:GuessTheNumber-v0?max_turns=6

WAITING = ("code:", "qa:", "math:", "mcp")
"""Prefixes of environments that start programs or send requests: their episodes must not take turns."""


def load_gem(name: str, options: dict[str, Any], source: str) -> LoadedEnvironment:
    """A row is an episode: its seed, and the first observation."""
    import gem
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        raise unknown_name(source, name, list(ENV_REGISTRY))

    def make() -> GemAdapter:
        return GemAdapter(lambda: gem.make(name, **options), None if name.startswith(WAITING) else EpisodeRandom())

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        seeds = random.Random(seed)
        # A new environment for each row: some count their resets.
        return [make().row(seeds.randrange(SEEDS)) for _ in range(count)]

    return LoadedEnvironment(EnvironmentInfo(name, "GEM's", offers_rows=True), make, rows=rows)


class GemAdapter(GymnasiumAdapter):
    def reset(self, task: Task) -> Any:
        """Use the seed of the row, if it has one."""
        seed = task.columns.get("seed")
        return super().reset(replace(task, seed=seed) if isinstance(seed, int) else task)

    def row(self, seed: int) -> dict[str, Any]:
        prompt: list[Message] = super().reset(Task(0, 0, seed))  # type: ignore[assignment]  # GEM has no coroutines
        return {"prompt": prompt, "seed": seed}


# ---- TextArena: reset(num_players, seed), get_observation(), step(action) -> (done, info), close() -> all rewards

TEXTARENA_SHAPE = "reset(num_players, seed), get_observation(), step(action) of two values (TextArena)"


def is_textarena(candidate: Any) -> bool:
    return has_methods(candidate, "reset", "step", "get_observation")


class TextArenaAdapter(EnvironmentAdapter):
    """Games of one player; the game itself plays the others."""

    def __init__(self, factory: EnvironmentFactory):
        self._random = EpisodeRandom()  # its games draw from the global generators
        self._environment = self._random.call(factory)
        self._player = 0
        self._open = False

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        self._random.seed(task.seed)
        self._open = True
        self._random.call(self._environment.reset, num_players=1, seed=task.seed % SEEDS)
        return [{"role": "user", "content": self._observation()}]

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        found = self._random.call(self._environment.step, action=turn.text)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"step gave {describe(found)}: done and info are needed")
        done, info = found
        if not done:
            return Step([{"role": "user", "content": self._observation()}], logs=to_metrics(info))
        return Step(reward=self._final_reward(), done=True, logs=to_metrics(info))

    def close(self) -> MaybeAwaitable[None]:
        if self._open:
            self._environment.close()
        return None

    def _observation(self) -> str:
        """What the game has said since the last call, without the player's own words."""
        self._player, found = self._environment.get_observation()
        if isinstance(found, str):
            return found
        return "\n".join(str(said[1]) for said in found if said[0] != self._player)

    def _final_reward(self) -> float:
        self._open = False
        found = self._environment.close()
        rewards = found[0] if isinstance(found, tuple) else found
        if not isinstance(rewards, dict) or self._player not in rewards:
            raise TypeError(f"close gave {describe(found)}: a dict of players and their rewards is needed")
        return to_float(rewards[self._player], f"the reward of player {self._player}")


# ---- reasoning-gym: a generator of questions, as in rg:basic_arithmetic?max_terms=2

ANSWER_FORMAT = "\n\nGive your final answer between <answer> and </answer>."


def load_reasoning_gym(name: str, options: dict[str, Any], source: str) -> LoadedEnvironment:
    """One turn an episode: a question, and an answer between tags that the generator scores. An entry is made again
    from the generator's seed and size (some generators draw all entries at once) and its index."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise unknown_name(source, name, sorted(DATASETS))

    @functools.lru_cache(8)
    def generator(seed: int, size: int) -> Any:
        return create_dataset(name, **options, seed=seed, size=size)

    try:
        generator(0, 1)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"--environment {source}: {' '.join(str(error).split())}") from error

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        found = []
        for index in range(count):
            columns = {"seed": seed % SEEDS, "size": count, "entry": index}
            entry = ReasoningGymAdapter(generator).entry(**columns)
            found.append({"prompt": _question(entry), "label": str(entry["answer"]), **columns})
        return found

    info = EnvironmentInfo(name, "reasoning-gym's", offers_rows=True)
    return LoadedEnvironment(info, lambda: ReasoningGymAdapter(generator), rows=rows)


class ReasoningGymAdapter(EnvironmentAdapter):
    def __init__(self, generator: Callable[[int, int], Any]):
        self._generator, self._random = generator, EpisodeRandom()

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        offered = [task.columns[name] for name in ("seed", "size", "entry") if name in task.columns]
        return _question(self.entry(*(offered if len(offered) == 3 else (task.seed % SEEDS, 1, 0))))

    def entry(self, seed: int, size: int, entry: int) -> dict[str, Any]:
        self._random.seed(seed)
        self._dataset = self._random.call(self._generator, seed, size)
        self._entry: dict[str, Any] = self._random.call(self._dataset.__getitem__, entry)
        return self._entry

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        score = self._dataset.score_answer(last_answer(turn.text), self._entry)
        return Step(reward=to_float(score, "the score"), done=True)


def _question(entry: dict[str, Any]) -> list[Message]:
    return [{"role": "user", "content": entry["question"] + ANSWER_FORMAT}]


def last_answer(text: str) -> str | None:
    """The text between the last pair of answer tags."""
    _, opened, rest = text.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if opened and closed else None
