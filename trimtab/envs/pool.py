"""What comes back from environments, each of one episode."""

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from trimtab.distributed.serialization import MessageSocket, MessageTooLarge
from trimtab.envs.adapter import EnvironmentInfo
from trimtab.envs.instance import AGENT_PATIENCE, Instance
from trimtab.envs.loader import load_object, with_tools
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.errors import UserError
from trimtab.sandbox.calls import Caller, Lanes, Late, Stuck
from trimtab.sandbox.process import WorkerProcess
from trimtab.sandbox.wait import LOOK_EVERY, PATIENCE, RunStopped, Waiting, spoken
from trimtab.sandbox.worker import SECONDS_TO_END, plain, told


@dataclass(frozen=True)
class Opened:
    episode: int
    messages: list[Message] | None  # None: the row's own prompt
    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas
    seconds: float = 0.0


@dataclass(frozen=True)
class Stepped:
    episode: int
    step: Step
    tool_calls: int = 0
    tool_failures: int = 0
    unknown_tools: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended:
    episode: int
    reward: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Broken:
    episode: int
    words: str
    innocent: bool = False  # its process was ended for another one's sake


Reply = Opened | Stepped | Ended | Broken


def reply_of(found: dict[str, Any], episode: int) -> Reply:
    """Of what a worker says, which has its own numbers for episodes."""
    kind, values = found["kind"], found["values"]
    if kind == "opened":
        return Opened(episode, **values)
    if kind == "stepped":
        return Stepped(episode, **values | {"step": Step(**values["step"])})
    if kind == "ended":
        return Ended(episode, **values)
    assert kind == "broken", kind
    return Broken(episode, **values)


# ---- A process that environments run in (worker.py), seen from the run: who lives there, and what they were asked.


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

    child: WorkerProcess
    channel: MessageSocket
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
        child = WorkerProcess("trimtab.envs.worker", words, captured=True)
        return cls(child, MessageSocket(child.socket), careful)

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
        """What it has said. EOFError, MessageTooLarge: see MessageSocket."""
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


# ---- the pool


@dataclass(frozen=True)
class Home:
    key: int  # of this instance alone; an episode that is begun anew has another
    worker: Worker


@dataclass(frozen=True)
class Ending:
    words: str | None = None  # why it is to be; None: it has died
    key: int | None = None  # for whose sake, where that is known


class Pool:
    def __init__(self, source: str, limits: EnvLimits, stopped: Callable[[], bool] = lambda: False):
        """Starts the first process, which loads the source. `stopped`: whether the run has been told to stop, which
        ends every wait (RunStopped)."""
        self.source, self.limits = source, limits
        self._stopped = stopped
        self._count = limits.workers or min(8, os.cpu_count() or 1)
        self._workers: list[Worker] = []
        self._homes: dict[int, Home] = {}  # of episodes
        self._episodes: dict[int, int] = {}  # by key
        self._suspects: set[int] = set()
        self._pending = PendingCalls(source, limits.seconds)
        self._next_key = 1
        self._replies: list[Reply] = []
        self._told: dict[int, Any] = {}  # rows, by key; and what the first process said, by 0
        self._failure: BaseException | None = None
        self._closed = False
        # Around everything above.
        self._state = threading.Condition()
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._listener = threading.Thread(target=self._listen, name="environments", daemon=True)
        self._workers.append(Worker.started(source, limits, careful=False))
        self._listener.start()
        try:
            self.about = EnvironmentInfo(**self._answer(0, f"environment {source} to be loaded"))
        except BaseException:
            self.close()
            raise

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Prompts of its own, where it offers them; waits."""
        with self._state:
            key = self._new_key()
            worker = self._place(careful=False)
            worker.keys.add(key)
            worker.ask("rows", key, count, seed)
            self._wake(worker)
        found: list[dict[str, Any]] = self._answer(key, f"rows of environment {self.source}")
        return found

    def reset(self, episode: int, task: Task) -> None:
        self._begin(episode, "reset", task)

    def run(self, episode: int, task: Task, *, base_url: str, api_key: str, model: str) -> None:
        """An episode that an agent plays at an endpoint; it ends by itself."""
        self._begin(episode, "run", task, base_url, api_key, model)

    def step(self, episode: int, turn: Turn) -> None:
        self._ask(episode, "step", turn)

    def end(self, episode: int) -> None:
        """Ask for the reward of the whole, if there is one, and close the instance."""
        self._ask(episode, "end")

    def drop(self, episode: int) -> None:
        """Give it up, wherever it is; no reply."""
        with self._state:
            self._replies = [reply for reply in self._replies if reply.episode != episode]
            self._suspects.discard(episode)
            self._pending.drop(episode)
            home = self._homes.pop(episode, None)
            if home is not None:
                del self._episodes[home.key]
                home.worker.forget(home.key)
                self._wake(home.worker)

    def finished(self, seconds: float) -> list[Reply]:
        """All replies that are there, when there is one; none where none comes within so many seconds."""
        deadline = time.monotonic() + seconds
        with self._state:
            while not self._replies:
                self._check()
                self._pending.report(self._is_loading)
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._state.wait(min(left, LOOK_EVERY))
            found, self._replies = self._replies, []
            self._pending.report(self._is_loading)
            return found

    def close(self) -> None:
        """End all of them; instances have a moment to be closed."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._wake(None)
        self._listener.join()
        for worker in self._workers:
            worker.child.dismiss()
        for worker in self._workers:
            worker.child.leave()
        os.close(self._woken)
        os.close(self._waking)

    # ---- asking

    def _begin(self, episode: int, kind: str, *words: Any) -> None:
        with self._state:
            assert episode not in self._homes, f"episode {episode} is under way"
            home = Home(self._new_key(), self._place(careful=episode in self._suspects))
            home.worker.keys.add(home.key)
            self._homes[episode], self._episodes[home.key] = home, episode
            self._pending.begin(episode, kind, words[0])
            home.worker.ask(kind, home.key, *words)
            self._wake(home.worker)

    def _ask(self, episode: int, kind: str, *words: Any) -> None:
        with self._state:
            home = self._homes.get(episode)
            if home is not None:  # else it is broken, and that is on its way to whoever asks
                self._pending.ask(episode, kind)
                home.worker.ask(kind, home.key, *words)
                self._wake(home.worker)

    def _is_loading(self, episode: int) -> bool:
        return not self._homes[episode].worker.loaded

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _place(self, *, careful: bool) -> Worker:
        """Where the fewest live; a new process where somebody lives in each, as long as there may be more."""
        fit = [worker for worker in self._workers if worker.careful == careful]
        if len(fit) < self._count and all(worker.keys for worker in fit):
            self._workers.append(Worker.started(self.source, self.limits, careful=careful))
            return self._workers[-1]
        return min(fit, key=lambda worker: (len(worker.keys), not worker.loaded))

    def _answer(self, key: int, what: str) -> Any:
        """What is told under a key, of what is not an episode's."""

        def there(seconds: float) -> bool:
            with self._state:
                self._check()
                return key in self._told or (self._state.wait(seconds) and key in self._told)

        told = f"{what}; given up after {spoken(LOADING_SECONDS)} at the latest"
        if not Waiting(self._stopped).until(there, LOADING_SECONDS + PING_EVERY, told):
            raise UserError(f"environment {self.source}: waited longer than {LOADING_SECONDS:g} s for {what}")
        found = self._told.pop(key)
        if isinstance(found, UserError):
            raise found
        return found

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the thread that listens to environments has failed") from self._failure
        if self._stopped():
            raise RunStopped

    def _wake(self, worker: Worker | None) -> None:
        """Have the listener look again, if there is more to be done for this process than it knows."""
        if worker is None or worker.channel.has_more or worker.is_new:
            try:
                os.write(self._waking, b".")
            except BlockingIOError:  # it has been woken often enough
                return

    # ---- listening, in a thread of its own: the run may be busy with something else

    def _listen(self) -> None:
        try:
            while not self._closed:
                self._round()
        except BaseException as error:
            with self._state:
                self._failure = error
                self._state.notify_all()

    def _round(self) -> None:
        with self._state:
            workers = list(self._workers)
            events = select.poll()
            events.register(self._woken, select.POLLIN)
            for worker in workers:
                worker.is_new = False
                events.register(worker.channel, select.POLLIN | select.POLLOUT * worker.channel.has_more)
        ready = {descriptor for descriptor, _ in events.poll(1000 * PING_EVERY)}
        if self._woken in ready:
            os.read(self._woken, 2**16)
        for worker in workers:
            if worker.channel.fileno() in ready:
                self._exchange(worker)
            with self._state:
                silence = worker.silence(time.monotonic(), self.limits.seconds) if worker in self._workers else None
            if silence is not None:
                self._end(worker, Ending(silence))

    def _exchange(self, worker: Worker) -> None:
        ending: Ending | None = None
        try:
            with self._state:
                worker.channel.flush()
            heard = worker.heard()  # which nobody else does: the run need not wait while it is read
            with self._state:
                for found in heard:
                    ending = self._hear(worker, found["kind"], found["key"], found) or ending
                self._state.notify_all()
        except MessageTooLarge:
            ending = Ending("said more at once than a run can hold")
        except EOFError:
            ending = Ending()
        if ending is not None:
            self._end(worker, ending)

    def _hear(self, worker: Worker, kind: str, key: int | None, found: dict[str, Any]) -> Ending | None:
        values = found["values"]
        if kind == "loaded":
            worker.loaded = True
            self._told.setdefault(0, values)
        elif kind == "stuck" or (kind == "unloadable" and key is None):
            return Ending(values, key)
        elif key is not None:
            worker.answered(key)
            episode = self._episodes.get(key)
            if kind in ("rows", "unloadable"):
                worker.keys.discard(key)
                self._told[key] = values if kind == "rows" else UserError(f"environment {self.source}: {values}")
            elif episode is not None:  # else it was dropped
                self._reply(reply_of(found, episode))
        return None

    def _reply(self, reply: Reply) -> None:
        self._pending.answered(reply)
        if isinstance(reply, Ended | Broken):
            home = self._homes.pop(reply.episode)
            del self._episodes[home.key]
            home.worker.keys.discard(home.key)
        if isinstance(reply, Ended):
            self._suspects.discard(reply.episode)
        self._replies.append(reply)

    def _end(self, worker: Worker, ending: Ending) -> None:
        """A process is ended, or found to have ended; whoever lived there is told."""
        with self._state:
            self._workers.remove(worker)
        if ending.words is None:
            words = worker.with_last_words(worker.child.how_it_died())
        else:
            worker.child.kill()
            words = worker.with_last_words(ending.words) if worker.loaded else ending.words
        with self._state:
            self._blame(worker, words, ending.key)
            self._state.notify_all()

    def _blame(self, worker: Worker, words: str, key: int | None) -> None:
        if not worker.loaded:
            named = words.startswith(("environment", "--environment"))
            self._told.setdefault(0, UserError(words if named else f"environment {self.source}: {words}"))
        blamed = {key} if key is not None else worker.asked or worker.keys
        # Any of those who were being asked may have done it. Where nobody was, what one of them left running has.
        uncertain = key is None and len(worker.asked) > 1 and worker.loaded
        for other in sorted(worker.keys):
            episode = self._episodes.get(other)
            if episode is None:
                self._told[other] = UserError(f"environment {self.source}: {words}")
            elif other in blamed or not worker.loaded:
                if key is None and worker.loaded:
                    self._suspects.add(episode)
                self._reply(Broken(episode, words, innocent=uncertain))
            else:
                self._reply(
                    Broken(episode, f"its process was ended for another episode's sake: {words}", innocent=True)
                )


# ---- environments in this process


ANSWERS = {"reset": "opened", "step": "stepped", "end": "ended", "run": "ended"}


class EnvironmentsHere:
    def __init__(self, source: Any, limits: EnvLimits):
        """`source`: a class of any known shape, a function that makes environments, or an agent."""
        self.loaded = with_tools(load_object(source))
        self.about, self._seconds = self.loaded.about, limits.seconds
        self._file = _file_of(source)
        self._threads = limits.threads
        self._instances: dict[int, Instance] = {}
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._dropped: set[int] = set()
        self._pending = PendingCalls(self.about.name, limits.seconds)
        self._loop = asyncio.new_event_loop()
        self._lanes: Lanes | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        assert self.loaded.rows is not None, "asked where they are offered"
        return self.loaded.rows(count, seed)

    def reset(self, episode: int, task: Task) -> None:
        self._dropped.discard(episode)
        self._pending.begin(episode, "reset", task)
        self._follow(self._begin(episode, "reset", [task]))

    def run(self, episode: int, task: Task, *, base_url: str, api_key: str, model: str) -> None:
        self._dropped.discard(episode)
        self._pending.begin(episode, "run", task)
        self._follow(self._begin(episode, "run", [task, base_url, api_key, model]))

    def step(self, episode: int, turn: Turn) -> None:
        self._pending.ask(episode, "step")
        self._follow(self._answer(episode, "step", [turn]))

    def end(self, episode: int) -> None:
        self._pending.ask(episode, "end")
        self._follow(self._answer(episode, "end", []))

    def drop(self, episode: int) -> None:
        self._dropped.add(episode)
        self._pending.drop(episode)
        self._follow(self._let_go(episode))

    def finished(self, seconds: float) -> list[Reply]:
        """All replies that are there, when there is one; none where none comes within so many seconds."""
        self._pending.report()
        deadline, found = time.monotonic() + seconds, list[Reply]()
        while not found:
            try:
                found.append(self._replies.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return []
            while not self._replies.empty():
                found.append(self._replies.get())
            found = [reply for reply in found if reply.episode not in self._dropped]
        return found

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(SECONDS_TO_END)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._lanes is not None:
            self._lanes.close()

    async def _end(self) -> None:
        for episode in list(self._instances):
            await self._let_go(episode)

    def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _begin(self, episode: int, kind: str, words: list[Any]) -> None:
        await self._let_go(episode)  # one that is begun anew
        if self._lanes is None:
            self._lanes = Lanes(self._threads)
        self._instances[episode] = Instance(self.loaded, Caller(self._lanes.taken(), self._file), self._seconds)
        await self._answer(episode, kind, words)

    async def _answer(self, episode: int, kind: str, words: list[Any]) -> None:
        instance = self._instances[episode]
        try:
            values = await instance.answer(kind, words)
            if not instance.dropped:
                self._reply(reply_of({"kind": ANSWERS[kind], "values": plain(values)}, episode))
        except Stuck as error:  # its thread is never free again, so nothing more can be asked of it
            self._instances.pop(episode, None)
            self._broken(episode, instance, str(error))
            return
        except BaseException as error:
            self._broken(episode, instance, str(error) if isinstance(error, Late) else told(error, self._file))
        else:
            if kind in ("step", "reset"):
                return
        await self._let_go(episode)

    def _broken(self, episode: int, instance: Instance, words: str) -> None:
        if not instance.dropped:
            self._reply(Broken(episode, words))

    def _reply(self, reply: Reply) -> None:
        self._pending.answered(reply)
        self._replies.put(reply)

    async def _let_go(self, episode: int) -> None:
        instance = self._instances.pop(episode, None)
        if instance is None:
            return
        instance.drop()
        with contextlib.suppress(Stuck):
            await instance.close()
            instance.caller.lane.instances -= 1


def _file_of(source: Any) -> str:
    try:
        return inspect.getfile(source)
    except (TypeError, OSError):  # made on the way
        return ""
