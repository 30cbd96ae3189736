"""A process that runs a reward function (worker.py), seen from the run: requests out, answers in, limits kept."""

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trimtab
from trimtab.errors import UserError
from trimtab.rewards.types import RewardRequest
from trimtab.rewards.waiting import Waiting, spoken

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
        self._connection, theirs = multiprocessing.Pipe()
        words = [str(theirs.fileno()), str(seconds), str(memory), str(file), *([function] if function else [])]
        source = str(Path(trimtab.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trimtab.rewards.worker", *words],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # which is ended as a whole
        )
        theirs.close()
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
            self._send(request)
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
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it, and everything that it started."""
        self._connection.close()
        self._end_group()

    def _end_group(self) -> int:
        if self._process.returncode is not None:
            return self._process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS, of a process that has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _send(self, request: RewardRequest) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except OSError:
            raise Stuck(self._death()) from None

    def _receive(self, seconds: float, *, grace: float = 0.0, told: str | None = None) -> dict[str, Any]:
        try:
            if not self._waiting.until(self._connection.poll, seconds + grace, told):
                raise Late(f"took longer than {seconds:g} s")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise Stuck(self._death()) from None

    def _told(self, message: dict[str, Any]) -> Fault | Stuck:
        if "late" in message:
            return Late(f"took longer than {self.seconds:g} s")
        if message["error"].startswith("MemoryError"):
            return Stuck(f"needed more than {self.memory / 2**30:g} GiB of memory")
        return Fault(message["error"])

    def _death(self) -> str:
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # its number stays its own until it is reaped
        code = self._end_group()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process died ({how})"
