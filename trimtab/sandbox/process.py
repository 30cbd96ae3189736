"""A process that runs somebody's code for us, seen from the run: it is started, and ended with all that it started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import trimtab
from trimtab.sandbox.worker import LAST_WORDS, VARIABLE, end_strays

SECONDS_TO_LEAVE = 2.0
SECONDS_TO_WRITE = 0.05  # in which its last words are brought here


class WorkerProcess:
    """`python -m MODULE HANDLE WORDS...`, which begins with within.begin; `socket` is the run's end of theirs."""

    def __init__(self, module: str, words: Sequence[str], *, captured: bool = False):
        """`captured`: what it prints is kept from the run's own output, and the end of it can be asked for."""
        self.socket, theirs = socket.socketpair()
        life, ours = os.pipe()
        self._life: int | None = ours  # which is held open for as long as the run lives
        self._printed = tempfile.TemporaryFile() if captured else None  # noqa: SIM115
        self._gone, self._words = False, ""
        self._mark = uuid.uuid4().hex
        source = str(Path(trimtab.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, f"{theirs.fileno()}:{life}", *words],
                pass_fds=[theirs.fileno(), life],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env=os.environ | {"PYTHONPATH": path, VARIABLE: self._mark},
                start_new_session=True,  # which is ended as a whole
            )
        os.close(life)

    @property
    def has_died(self) -> bool:
        if self._process.returncode is not None:
            return True
        # Its number stays its own until it is reaped.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def how_it_died(self) -> str:
        """In words, when it has or is about to; what it left running is ended."""
        deadline = time.monotonic() + SECONDS_TO_LEAVE  # of one that has closed its end and lives
        while not self.has_died and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._printed is not None and not self._gone:
            time.sleep(SECONDS_TO_WRITE)
        code = self.kill()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process died ({how})"

    def last_words(self) -> str:
        """The end of what it printed, where that is captured."""
        if self._gone or self._printed is None:
            return self._words
        return os.pread(self._printed.fileno(), LAST_WORDS, 0).decode(errors="replace")

    def dismiss(self) -> None:
        """It has a moment to tidy up, and then ends."""
        self.socket.close()
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def leave(self) -> None:
        """As `dismiss`, and wait until it has."""
        self.dismiss()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=SECONDS_TO_LEAVE)
        self.kill()

    def kill(self) -> int:
        """End it, and everything that it started; its exit code, or the signal as a negative number."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS, of one that has ended
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if not self._gone:
            self._words, self._gone = self.last_words(), True
            self.dismiss()
            end_strays(self._mark)
            if self._printed is not None:
                self._printed.close()
        return code
