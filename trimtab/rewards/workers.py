"""A process that runs a reward function (worker.py), seen from the run: requests out, answers in, limits kept."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trimtab.errors import UserError
from trimtab.processes.child import Child
from trimtab.processes.waiting import Waiting, spoken
from trimtab.rewards.types import RewardRequest

LOADING_SECONDS = 300.0  # a file may import a library, and that a slow disk


class Stuck(Exception):
    """A call that had to be ended: it took too long, or its process died."""


class Late(Stuck):
    """It took too long."""


class Fault(Exception):
    """The function raised; its own words."""


class Worker:
    """One process that runs the function, and what it says about it (`about`)."""

    def __init__(self, file: Path, function: str | None, seconds: float, memory: int, waiting: Waiting):
        self.seconds, self.memory = seconds, memory
        self._waiting = waiting
        words = [str(seconds), str(memory), str(file), *([function] if function else [])]
        self._child = Child("trimtab.rewards.worker", words)
        self._connection = Connection(self._child.socket.detach())
        self.about: dict[str, Any] = {}
        try:
            told = f"{file} to be loaded; given up after {spoken(LOADING_SECONDS)} at the latest"
            self.about = self._receive(LOADING_SECONDS, told=told)
            if "error" in self.about:
                raise Stuck(self.about["error"])
        except Stuck as error:
            raise UserError(f"reward function {file}: {error}") from error
        finally:
            if "name" not in self.about:
                self.kill()

    @property
    def is_alive(self) -> bool:
        return not self._connection.closed

    def answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        """What the function returned: `count` values, each within the limit. Ends early with a Fault or Stuck."""
        received = 0
        try:
            # Two million numbers take longer than their text, on either side.
            self._send(request if self.about["reads_ids"] else replace(request, prompt_ids=[], response_ids=[]))
            while received < count:
                # An async function counts its own time; waiting longer is for a process that no longer does.
                message = self._receive(self.seconds, grace=1.0 if self.about["is_async"] else 0.0)
                received += 1
                if "answer" not in message:
                    raise self._told(message)
                yield message["answer"]
        finally:
            if received < count:
                self.kill()  # what it may still say belongs to nobody

    def close(self) -> None:
        self._connection.close()  # which ends an idle worker
        self._child.leave()

    def kill(self) -> None:
        """End it, and everything that it started."""
        self._connection.close()
        self._child.kill()

    def _send(self, request: RewardRequest) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except OSError:
            raise Stuck(self._child.how_it_died()) from None

    def _receive(self, seconds: float, *, grace: float = 0.0, told: str | None = None) -> dict[str, Any]:
        try:
            if not self._waiting.until(self._connection.poll, seconds + grace, told):
                raise Late(f"took longer than {seconds:g} s")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise Stuck(self._child.how_it_died()) from None

    def _told(self, message: dict[str, Any]) -> Fault | Stuck:
        if "late" in message:
            return Late(f"took longer than {self.seconds:g} s")
        if message["error"].startswith("MemoryError"):
            return Stuck(f"needed more than {self.memory / 2**30:g} GiB of memory")
        return Fault(message["error"])
