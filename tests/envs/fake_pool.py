"""Environments in this process, in place of a pool of others: quick, and as faulty as a test wants them."""

from collections.abc import Callable, Sequence
from typing import Any

from trimtab.envs.adapter import EnvironmentInfo
from trimtab.envs.environment_pool import EndReply, FailureReply, ResetReply, StepReply
from trimtab.envs.types import Step, Task, Turn


class Counting:
    """Says how many turns there were and what it heard last; done after so many."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, turns: int = 3, last: float = 0.0):
        self.turns, self.last = turns, last
        self.heard: list[Turn] = []

    def reset(self, task: Task):
        self.task = task
        return [{"role": "user", "content": f"Begin {task.row}."}]

    def step(self, turn: Turn) -> Step:
        self.heard.append(turn)
        done = len(self.heard) >= self.turns
        said = f"Turn {turn.number} had {len(turn.ids)} tokens, room {turn.room}."
        return Step(messages=said, reward=float(turn.number + 1), done=done, logs={"heard": float(len(self.heard))})

    def get_reward(self) -> float:
        return self.last


def stepping(step: Callable[[Any, Turn], Step]) -> type[Counting]:
    """An environment whose step is this function of itself and the turn."""
    return type("Stepping", (Counting,), {"step": step})


class Fault(Exception):
    def __init__(self, words: str, innocent: bool = False):
        self.words, self.innocent = words, innocent


def failing(times: int, when: Callable[..., bool], words: str = "boom", innocent: bool = False) -> Callable[..., None]:
    """A fault of a pool that comes so many times; `when` is asked with what is done, the instance and those before."""
    seen: list[Any] = []

    def fault(what: str, instance: Any) -> None:
        if len(seen) < times and when(what, instance, seen):
            seen.append(instance)
            raise Fault(words, innocent)

    return fault


class Pool:
    """`slow`: so many looks pass before a reply comes; `fault` may raise for (what, episode, turns heard)."""

    def __init__(self, make: Callable[[], Any] = Counting, slow: int = 0, fault: Callable[..., None] | None = None):
        self.make, self.slow, self.fault = make, slow, fault
        self.info = EnvironmentInfo("test", "of a test", tools=list(getattr(make, "tools", ())))
        self.instances: dict[int, Any] = {}
        self.made: list[Any] = []
        self.dropped: list[int] = []
        self.closed = False
        self._waiting: list[list[Any]] = []

    def reset(self, episode: int, task: Task) -> None:
        assert episode not in self.instances, "one episode at a time"
        instance = self.instances[episode] = self.make()
        self.made.append(instance)
        self._reply("reset", episode, lambda: ResetReply(episode, instance.reset(task), list(instance.tools), 0.25))

    def step(self, episode: int, turn: Turn) -> None:
        instance = self.instances[episode]
        self._reply("step", episode, lambda: StepReply(episode, instance.step(turn), seconds=0.5))

    def end(self, episode: int) -> None:
        instance = self.instances[episode]

        def end() -> EndReply:
            del self.instances[episode]
            return EndReply(episode, instance.get_reward(), {"ended": 1.0}, 0.125)

        self._reply("end", episode, end)

    def drop(self, episode: int) -> None:
        self.instances.pop(episode, None)
        self.dropped.append(episode)
        self._waiting = [waiting for waiting in self._waiting if waiting[1] != episode]

    def poll(self, seconds: float) -> list[Any]:
        for waiting in self._waiting:
            waiting[0] -= 1
        ready = [waiting for waiting in self._waiting if waiting[0] < 0]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] >= 0]
        return [answer() for _, _, answer in ready]

    def close(self) -> None:
        self.closed = True

    def _reply(self, what: str, episode: int, answer: Callable[[], Any]) -> None:
        instance = self.instances[episode]

        def guarded() -> Any:
            try:
                if self.fault is not None:
                    self.fault(what, instance)
                return answer()
            except Fault as fault:
                self.instances.pop(episode, None)
                return FailureReply(episode, fault.words, fault.innocent)

        self._waiting.append([self.slow, episode, guarded])
