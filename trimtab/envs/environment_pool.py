"""Pools of environments that play many episodes at once: in worker processes (`EnvironmentPool`), in this process
(`LocalEnvironmentPool`), or in the first process of a tensor-parallel group (`BroadcastPool`). Only `finished` and
`rows` wait.

Every call of an episode (`reset`, `step`, `end`, `run`) is answered by one reply. After `EndReply` or `FailureReply`
the episode has no instance; its number may be used again.
"""

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from trimtab.distributed.process_group import Peers
from trimtab.envs.adapter import EnvironmentInfo
from trimtab.envs.loader import AGENT_PATIENCE, EnvironmentInstance, load_object, with_tools
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.errors import RunFailed, UserError
from trimtab.sandbox.calls import InstanceService, LoadFailed, SandboxError
from trimtab.sandbox.pool import (
    LOADING_SECONDS,
    Failure,
    LocalPool,
    Result,
    SandboxLimits,
    SandboxPool,
    WorkerPool,
)
from trimtab.sandbox.process import PATIENCE, PING_EVERY, CallSession, duration


@dataclass(frozen=True)
class ResetReply:
    episode: int
    messages: list[Message] | None  # None: the row's own prompt
    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas
    seconds: float = 0.0


@dataclass(frozen=True)
class StepReply:
    episode: int
    step: Step
    tool_calls: int = 0
    tool_failures: int = 0
    unknown_tools: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class EndReply:
    episode: int
    reward: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class FailureReply:
    episode: int
    words: str
    innocent: bool = False  # its process was ended because of another episode


Reply = ResetReply | StepReply | EndReply | FailureReply


def _reply(found: Result | Failure) -> Reply:
    if isinstance(found, Failure):
        return FailureReply(found.session.tag, str(found.error), found.innocent)
    episode, values = found.session.tag, found.values
    if found.method == "reset":
        return ResetReply(episode, **values)
    if found.method == "step":
        return StepReply(episode, **values | {"step": Step(**values["step"])})
    return EndReply(episode, **values)


# ---- reports of long waits


@dataclass
class PendingEnvironmentCall:
    task: Task
    kind: str  # reset, step, end; run: a whole episode of an agent
    since: float
    reported: bool = False


class PendingCalls:
    """Calls that environments have not answered. One that takes long is reported in one line.

    Long is more than PATIENCE, and more than twice what any answer has taken so far: an environment that is always slow
    is reported once. An agent plays turns meanwhile, so for it long is what a call may take."""

    def __init__(self, source: str, seconds: float):
        """`seconds`: that a call may take."""
        self.source, self.seconds = source, seconds
        self._tasks: dict[int, Task] = {}  # of episodes
        self._calls: dict[int, PendingEnvironmentCall] = {}  # of episodes, the oldest first
        self._longest = 0.0  # seconds of an answer

    def begin(self, episode: int, kind: str, task: Task) -> None:
        self._tasks[episode] = task
        self.ask(episode, kind)

    def ask(self, episode: int, kind: str) -> None:
        self._calls[episode] = PendingEnvironmentCall(self._tasks[episode], kind, time.monotonic())

    def answered(self, reply: Reply, now: float | None = None) -> None:
        """`now`: when the reply came."""
        call = self._calls.pop(reply.episode, None)
        if call is not None and not isinstance(reply, FailureReply):
            self._longest = max(self._longest, (now or time.monotonic()) - call.since)
        if isinstance(reply, EndReply | FailureReply):
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
            + (f"{duration(LOADING_SECONDS)} of loading" if loading(episode) else f"{duration(limit)} (--env_timeout)"),
            file=sys.stderr,
            flush=True,
        )


# ---- pools


class InstancePool(Protocol):
    """Running environments or agents. No method waits but `finished`."""

    def drop(self, episode: int) -> None: ...

    def poll(self, seconds: float) -> list[Reply]: ...

    def close(self) -> None: ...


class EnvironmentInstances(InstancePool, Protocol):
    """Running environments, which are stepped turn by turn."""

    @property
    def info(self) -> EnvironmentInfo: ...

    def reset(self, episode: int, task: Task) -> None: ...

    def step(self, episode: int, turn: Turn) -> None: ...

    def end(self, episode: int) -> None: ...


class Environments:
    """The episodes of a pool, wherever their instances are."""

    def __init__(self, pool: SandboxPool, name: str, seconds: float):
        """`name`: what reports call the environment; `seconds`: that a call may take."""
        self._pool, self.info = pool, EnvironmentInfo(**pool.info)
        self._inbox: deque[Result | Failure] = deque()
        self._sessions: dict[int, CallSession] = {}  # of episodes
        self._suspects: set[int] = set()  # episodes that may have ended their process
        self._pending = PendingCalls(name, seconds)

    def reset(self, episode: int, task: Task) -> None:
        self._begin(episode, "reset", task)

    def run(self, episode: int, task: Task, *, base_url: str, api_key: str, model: str) -> None:
        """An episode that an agent plays at an endpoint; it ends by itself."""
        self._begin(episode, "run", task, base_url, api_key, model, final=True)

    def step(self, episode: int, turn: Turn) -> None:
        self._call(episode, "step", turn)

    def end(self, episode: int) -> None:
        """Ask for the reward of the whole episode, if there is one, and close the instance."""
        self._call(episode, "end", final=True)

    def drop(self, episode: int) -> None:
        """Give the episode up, whatever it does; no reply."""
        with self._pool.state:
            self._suspects.discard(episode)
            self._pending.drop(episode)
            if (session := self._sessions.pop(episode, None)) is not None:
                self._pool.drop(session)

    def poll(self, seconds: float) -> list[Reply]:
        """All replies that have come, waiting up to this time for the first."""
        deadline = time.monotonic() + seconds
        while not self._pool.wait(self._inbox, max(0.0, deadline - time.monotonic())):
            self._report()
            if time.monotonic() >= deadline:
                return []
        with self._pool.state:
            found = [self._take(self._inbox.popleft()) for _ in range(len(self._inbox))]
        self._report()
        return found

    def close(self) -> None:
        """End all instances; they have a moment to be closed."""
        self._pool.close()

    def _begin(self, episode: int, method: str, task: Task, *arguments: Any, final: bool = False) -> None:
        with self._pool.state:
            assert episode not in self._sessions, f"episode {episode} has an instance"
            self._pending.begin(episode, method, task)
            how: dict[str, Any] = {"final": final, "inbox": self._inbox, "tag": episode}
            serial = episode in self._suspects
            self._sessions[episode] = self._pool.open(method, task, *arguments, serial=serial, **how)

    def _call(self, episode: int, method: str, *arguments: Any, final: bool = False) -> None:
        with self._pool.state:
            if (session := self._sessions.get(episode)) is not None:  # else it has broken
                self._pending.ask(episode, method)
                self._pool.call(session, method, *arguments, final=final)

    def _take(self, found: Result | Failure) -> Reply:
        reply = _reply(found)
        self._pending.answered(reply, found.time if isinstance(found, Result) else None)
        if isinstance(reply, EndReply | FailureReply):
            del self._sessions[reply.episode]
        if isinstance(reply, EndReply):
            self._suspects.discard(reply.episode)
        elif isinstance(found, Failure) and found.suspect:
            self._suspects.add(reply.episode)
        return reply

    def _report(self) -> None:
        def loading(episode: int) -> bool:
            worker = self._sessions[episode].worker
            return worker is not None and not worker.loaded

        with self._pool.state:
            self._pending.report(loading)


class EnvironmentPool(Environments):
    """The environment of a source (`load`), in worker processes."""

    def __init__(self, source: str, limits: SandboxLimits, stopped: Callable[[], bool] = lambda: False):
        """Starts the first process, which loads the source. `stopped`: whether the run has been told to stop, which
        ends every wait (RunStopped)."""
        self.source = source
        how: dict[str, Any] = {"shared": True, "output": "tail", "title": f"environment {source}"}
        try:
            pool = WorkerPool("trimtab.envs.loader", source, limits, stopped, **how)
        except LoadFailed as error:
            named = str(error).startswith(("environment", "--environment"))
            raise UserError(str(error) if named else f"environment {source}: {error}") from error
        super().__init__(pool, source, limits.seconds)

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Prompts that the environment offers, where it does; waits."""
        report = f"rows of environment {self.source}; given up after {duration(LOADING_SECONDS)} at the latest"
        session = self._pool.open("rows", count, seed, final=True)
        try:
            found: list[dict[str, Any]] = self._pool.result(session, LOADING_SECONDS + PING_EVERY, report)
            return found
        except SandboxError as error:
            raise UserError(f"environment {self.source}: {error}") from error
        finally:
            self._pool.drop(session)


class LocalEnvironmentPool(Environments):
    """An environment in this process, for a class that no other process could import (LocalPool)."""

    def __init__(self, source: Any, limits: SandboxLimits):
        """`source`: a class of any known shape, a function that makes environments, or an agent."""
        self.loaded = with_tools(load_object(source))
        about = self.loaded.info
        try:
            file = inspect.getfile(source)
        except (TypeError, OSError):  # made at run time
            file = ""
        service = InstanceService(asdict(about), file, partial(EnvironmentInstance, self.loaded))
        super().__init__(LocalPool(service, limits), about.name, limits.seconds)

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        assert self.loaded.rows is not None, "asked where they are offered"
        return self.loaded.rows(count, seed)


REPLY_TYPES: dict[str, type[Reply]] = {kind.__name__: kind for kind in (ResetReply, StepReply, EndReply, FailureReply)}


class BroadcastPool:
    """The environments of a tensor-parallel group. All its processes make the same calls and generate the same tokens:
    the first asks the environments, and the others get its replies."""

    def __init__(self, open_pool: Callable[[], EnvironmentInstances], peers: Peers):
        """`open_pool`: called in the first process only."""
        self._pool: EnvironmentInstances | None = None
        self._peers = peers

        def opened() -> dict[str, Any]:
            self._pool = open_pool()
            return asdict(self._pool.info)

        self.info = EnvironmentInfo(**self._broadcast(opened))

    def _broadcast(self, find: Callable[[], Any]) -> Any:
        """The first process's result, in all processes. If it raises, all raise an error with its message."""
        if not self._peers.is_rank_zero:
            found, words, mistaken = self._peers.gather(None)[0]
            if words is not None:
                raise UserError(words) if mistaken else RunFailed(words)
            return found
        try:
            found = find()
        except Exception as error:
            self._peers.gather([None, str(error) or type(error).__name__, isinstance(error, UserError)])
            raise
        self._peers.gather([found, None, False])
        return found

    def reset(self, episode: int, task: Task) -> None:
        if self._pool is not None:
            self._pool.reset(episode, task)

    def step(self, episode: int, turn: Turn) -> None:
        if self._pool is not None:
            self._pool.step(episode, turn)

    def end(self, episode: int) -> None:
        if self._pool is not None:
            self._pool.end(episode)

    def drop(self, episode: int) -> None:
        if self._pool is not None:
            self._pool.drop(episode)

    def poll(self, seconds: float) -> list[Reply]:
        def replies() -> list[list[Any]]:
            assert self._pool is not None, "the first has it"
            return [[type(reply).__name__, asdict(reply)] for reply in self._pool.poll(seconds)]

        found = []
        for kind, values in self._broadcast(replies):
            step = {"step": Step(**values["step"])} if "step" in values else {}
            found.append(REPLY_TYPES[kind](**{**values, **step}))
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
