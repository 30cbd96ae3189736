"""The process in which environments run: `python -m trimtab.envs.worker HANDLE SECONDS BYTES THREADS SOURCE`.

It reads what a pool asks of its instances and answers in JSON, many at once: plain methods in threads, others on one
loop (lanes.py). A call that does not end is told, and the run ends the process.
"""

import asyncio
import contextlib
import json
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from trimtab.envs.adapter import LoadedEnvironment, describe
from trimtab.envs.instance import Instance
from trimtab.envs.loader import load, split
from trimtab.errors import UserError
from trimtab.sandbox.calls import Caller, Lanes, Late, Stuck, line_of
from trimtab.sandbox.worker import SECONDS_TO_END, begin_worker, plain, told

ANSWERS = {"reset": "opened", "step": "stepped", "end": "ended", "run": "ended"}


def main(handle: str, seconds: str, memory: str, threads: str, source: str) -> None:
    connection = begin_worker(handle, int(memory), captured=True)
    file = str(split(source)[0])
    try:
        loaded = load(source)
    except BaseException as error:
        words = str(error) if isinstance(error, UserError) else f"environment {source}: {told(error, file)}"
        connection.send_bytes(_encoded("unloadable", None, words))
        return
    connection.send_bytes(_encoded("loaded", None, asdict(loaded.about)))
    asyncio.run(Worker(connection, loaded, file, float(seconds), int(memory), int(threads)).serve())


class Worker:
    def __init__(
        self, connection: Connection, loaded: LoadedEnvironment, file: str, seconds: float, memory: int, threads: int
    ):
        self._connection, self._loaded, self._file = connection, loaded, file
        self._seconds, self._memory = seconds, memory
        self._lanes = Lanes(threads)
        self._instances: dict[int, Instance] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._asked: float | None = None  # when the loop was first asked for the sign that it owes
        self._over = asyncio.Event()

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()
        await self._over.wait()
        for key, instance in list(self._instances.items()):
            self._drop(key, instance)
        if self._work:
            await asyncio.wait(self._work, timeout=0.8 * SECONDS_TO_END)

    def _write(self) -> None:
        # In a thread of its own: the run may be busy, and what it does not read must hold up nobody here.
        with contextlib.suppress(OSError):
            while True:
                self._connection.send_bytes(self._outgoing.get())

    def _read(self) -> None:
        try:
            while True:
                kind, key, *words = pickle.loads(self._connection.recv_bytes())
                if kind == "ping":
                    self._say("pong", None, None)
                    self._look_at_loop()
                else:
                    self._loop.call_soon_threadsafe(self._begin, kind, key, words)
        except (EOFError, OSError):  # the run has closed us, or is gone
            self._loop.call_soon_threadsafe(self._over.set)

    def _look_at_loop(self) -> None:
        """From the reading thread: does a coroutine hold up all others?"""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            self._loop.call_soon_threadsafe(self._give_sign)
        elif now - self._asked > self._seconds:
            task = asyncio.current_task(self._loop)
            name = task.get_name() if task is not None else ""
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            place = "" if frame is None else line_of(traceback.extract_stack(frame), self._file)
            words = f"a coroutine held up all others for longer than {self._seconds:g} s{place}"
            self._say("stuck", int(name) if name.isdigit() else None, words)

    def _give_sign(self) -> None:
        self._asked = None

    def _say(self, kind: str, key: int | None, values: Any) -> None:
        self._outgoing.put(_encoded(kind, key, values))

    def _begin(self, kind: str, key: int, words: list[Any]) -> None:
        if kind == "rows":
            self._follow(key, self._rows(key, *words))
        elif kind == "drop":
            if key in self._instances:
                self._drop(key, self._instances[key])
        else:
            if kind in ("reset", "run"):
                self._instances[key] = Instance(self._loaded, Caller(self._lanes.taken(), self._file), self._seconds)
            self._instances[key].busy = True
            self._follow(key, self._answer(kind, key, self._instances[key], words))

    def _follow(self, key: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=str(key))
        self._work.add(task)  # the loop itself holds them weakly
        task.add_done_callback(self._work.discard)

    async def _answer(self, kind: str, key: int, instance: Instance, words: list[Any]) -> None:
        try:
            values = await instance.answer(kind, words)
            if not instance.dropped:
                self._say(ANSWERS[kind], key, values)
            instance.dropped = instance.dropped or kind in ("end", "run")
        except Stuck as error:  # it is never free again
            self._say("stuck", key, str(error))
            return
        except MemoryError:
            self._say("stuck", key, f"needed more than {self._memory / 2**30:g} GiB of memory")
            return
        except BaseException as error:
            if not instance.dropped:
                self._say("broken", key, {"words": str(error) if isinstance(error, Late) else told(error, self._file)})
            instance.dropped = True
        instance.busy = False
        if instance.dropped:
            await self._let_go(key, instance)

    def _drop(self, key: int, instance: Instance) -> None:
        instance.drop()
        if not instance.busy:
            self._follow(key, self._let_go(key, instance))

    async def _let_go(self, key: int, instance: Instance) -> None:
        if self._instances.pop(key, None) is None:
            return
        try:
            await instance.close()
        except Stuck as error:
            self._say("stuck", key, str(error))
        instance.caller.lane.instances -= 1

    async def _rows(self, key: int, count: int, seed: int) -> None:
        assert self._loaded.rows is not None, "asked where they are offered"
        try:
            found = await asyncio.to_thread(self._loaded.rows, count, seed)
            wrong = [found] if not isinstance(found, list) else [row for row in found if not isinstance(row, dict)]
            if wrong:
                raise TypeError(f"rows({count}, {seed}) gave {describe(wrong[0])}: a list of dicts is needed")
            self._say("rows", key, found)
        except BaseException as error:
            self._say("unloadable", key, told(error, self._file))


def _encoded(kind: str, key: int | None, values: Any) -> bytes:
    return json.dumps({"kind": kind, "key": key, "values": plain(values)}).encode()


if __name__ == "__main__":
    main(*sys.argv[1:])
