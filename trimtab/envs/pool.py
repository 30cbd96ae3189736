"""Processes that environments run in, and many episodes in each. Nothing here waits but `finished`.

Whoever does not end is ended with its process, and those who lived there with it are told that they are innocent. Where
a process dies, whoever was being asked something may have done it: if there were several, none is blamed, and the next
instance of each lives in a process where they are asked one after another.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab.envs.adapter import EnvironmentInfo
from trimtab.envs.replies import Broken, Ended, Reply, reply_of
from trimtab.envs.types import Task, Turn
from trimtab.envs.workers import LOADING_SECONDS, PING_EVERY, EnvLimits, PendingCalls, Worker
from trimtab.errors import UserError
from trimtab.processes.channel import TooLarge
from trimtab.processes.waiting import LOOK_EVERY, GivenUp, Waiting, spoken


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
        ends every wait (GivenUp)."""
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
            raise GivenUp

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
        except TooLarge:
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
