"""Environments in this process, for classes that no other process could import: what a pool does (pool.py), without its
protection. Whoever does not end is given up after its time, but its thread goes on."""

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Coroutine
from typing import Any

from trimtab.envs.lanes import Caller, Lanes, Late, Stuck
from trimtab.envs.load import load_object, with_tools
from trimtab.envs.playing import Instance
from trimtab.envs.replies import Broken, Reply, reply_of
from trimtab.envs.types import Task, Turn
from trimtab.envs.workers import EnvLimits, PendingCalls
from trimtab.processes.telling import plain, told
from trimtab.processes.within import SECONDS_TO_END

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
