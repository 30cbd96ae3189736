"""A process that environments run in (worker.py), seen from the run: who lives there, and what they were asked."""

import json
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trimtab.envs.playing import AGENT_PATIENCE
from trimtab.envs.replies import Broken, Ended, Reply
from trimtab.envs.types import Task
from trimtab.processes.channel import Channel
from trimtab.processes.child import Child
from trimtab.processes.waiting import PATIENCE, spoken

PING_EVERY = 0.5  # seconds, where somebody waits for an answer
GRACE = 5.0  # seconds beyond a call's own, of a process that says nothing at all
LOADING_SECONDS = 300.0  # a source may import a library, and that from a slow disk


@dataclass(frozen=True)
class EnvLimits:
    seconds: float = 60.0
    """That a reset, a step or a tool call may take."""
    workers: int | None = None
    """Processes; unset: one a core, and at most 8."""
    threads: int = 16
    """In which plain methods run, in each of them; coroutines all run at once."""
    memory_gib: float = 8.0
    """Of each of them."""


@dataclass
class PendingCall:
    task: Task
    kind: str  # reset, step, end; run: a whole episode of an agent
    since: float
    reported: bool = False


class PendingCalls:
    """Calls that environments have not answered. One that takes long is reported in one line.

    Long is more than PATIENCE, and more than twice what any answer has taken so far: an environment that is always slow
    is reported once. An agent plays turns meanwhile, so long is for it what a call may take."""

    def __init__(self, source: str, seconds: float):
        """`seconds`: that a call may take."""
        self.source, self.seconds = source, seconds
        self._tasks: dict[int, Task] = {}  # of episodes
        self._calls: dict[int, PendingCall] = {}  # of episodes, the oldest first
        self._longest = 0.0  # seconds of an answer

    def begin(self, episode: int, kind: str, task: Task) -> None:
        self._tasks[episode] = task
        self.ask(episode, kind)

    def ask(self, episode: int, kind: str) -> None:
        self._calls[episode] = PendingCall(self._tasks[episode], kind, time.monotonic())

    def answered(self, reply: Reply) -> None:
        call = self._calls.pop(reply.episode, None)
        if call is not None and not isinstance(reply, Broken):
            self._longest = max(self._longest, time.monotonic() - call.since)
        if isinstance(reply, Ended | Broken):
            self._tasks.pop(reply.episode, None)

    def drop(self, episode: int) -> None:
        self._calls.pop(episode, None)
        self._tasks.pop(episode, None)

    def report(self, loading: Callable[[int], bool] = lambda episode: False) -> None:
        """`loading`: whether the process of an episode has yet to load the environment."""
        now = time.monotonic()
        late = []
        for episode, call in list(self._calls.items()):
            patience = self.seconds if call.kind == "run" else PATIENCE
            if now - call.since <= max(patience, 2 * self._longest):
                break
            late.append((episode, call))
        if not late or late[0][1].reported:
            return
        for _, call in late:
            call.reported = True
        episode, call = late[0]
        limit = self.seconds * (AGENT_PATIENCE if call.kind == "run" else 1)
        more = f" and {len(late) - 1:,} more" if len(late) > 1 else ""
        print(
            f"waiting for {now - call.since:.0f} s now: environment {self.source}, {call.kind} of row {call.task.row}, "
            f"sample {call.task.sample}{more}; given up after "
            + (f"{spoken(LOADING_SECONDS)} of loading" if loading(episode) else f"{spoken(limit)} (--env_timeout)"),
            file=sys.stderr,
            flush=True,
        )


@dataclass(eq=False)
class Worker:
    """`careful`: what is asked there is asked one after another, so that who ends the process is known."""

    child: Child
    channel: Channel
    careful: bool
    began: float = field(default_factory=time.monotonic)
    is_new: bool = True  # nobody listens to it yet
    loaded: bool = False
    keys: set[int] = field(default_factory=set)
    """Of those who live there."""
    asked: set[int] = field(default_factory=set)
    """Of those who owe an answer."""
    _waiting: deque[tuple[int, bytes]] = field(default_factory=deque)
    _pinged: float = 0.0
    _silent_since: float | None = None

    @classmethod
    def started(cls, source: str, limits: EnvLimits, *, careful: bool) -> "Worker":
        memory = int(limits.memory_gib * 2**30)
        words = [str(limits.seconds), str(memory), str(limits.threads), source]
        child = Child("trimtab.envs.worker", words, captured=True)
        return cls(child, Channel(child.socket), careful)

    def ask(self, kind: str, key: int, *words: Any) -> None:
        message = pickle.dumps((kind, key, *words))
        if self.careful and self.asked:
            self._waiting.append((key, message))
        else:
            self.asked.add(key)
            self.channel.send(message)

    def forget(self, key: int) -> None:
        """It wants no answer any more."""
        self.keys.discard(key)
        self._waiting = deque(entry for entry in self._waiting if entry[0] != key)
        self.channel.send(pickle.dumps(("drop", key)))
        self.answered(key)

    def answered(self, key: int) -> None:
        self.asked.discard(key)
        if not self.asked and self._waiting:
            following, message = self._waiting.popleft()
            self.asked.add(following)
            self.channel.send(message)

    def heard(self) -> list[dict[str, Any]]:
        """What it has said. EOFError, TooLarge: see Channel."""
        found = [json.loads(message) for message in self.channel.receive()]
        if found:
            self._silent_since = None
        return found

    def silence(self, now: float, seconds: float) -> str | None:
        """Why it must be ended, if it must: asked for a sign, it gives none."""
        if not self.loaded:
            late = now - self.began > LOADING_SECONDS
            return f"took longer than {LOADING_SECONDS:g} s to be loaded" if late else None
        if self._silent_since is not None and now - self._silent_since > seconds + GRACE:
            return f"nothing was heard of its process for longer than {seconds + GRACE:g} s"
        if self.asked and now - self._pinged > PING_EVERY:
            self._pinged = now
            self._silent_since = self._silent_since or now
            self.channel.send(pickle.dumps(("ping", 0)))
        return None

    def with_last_words(self, words: str) -> str:
        """And the end of what was printed there, which may say more."""
        printed = [" ".join(line.split()) for line in self.child.last_words().splitlines()[-20:]]
        last = " / ".join(line for line in printed if line)[-400:]
        return f"{words}; printed last: {last}" if last else words
