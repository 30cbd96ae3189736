"""A stand-in for a training command: `python -m tests.distributed.crash RANK WHAT [SECONDS FOLDER]`.

It imports nothing heavy. The process RANK does WHAT; the others wait for it, and all note in FOLDER that they began,
and that a signal asked them to leave.
"""

import os
import signal
import sys
import time
from pathlib import Path

from trimtab.distributed.supervision import own_heartbeat, watch


def main() -> None:
    rank, what, *more = sys.argv[1:]
    mine = os.environ["RANK"]
    if more:
        seconds, folder = float(more[0]), Path(more[1])
        signal.signal(signal.SIGTERM, lambda *_: leave(folder / f"asked{mine}"))
        watch(seconds)
        (folder / f"began{mine}").write_text(str(os.getpid()))
    if mine == rank:
        if what == "raise":
            raise ValueError("the worker's own words")
        if what == "kill":
            os.kill(os.getpid(), 9)
        if what == "stop":
            time.sleep(0.5)  # a first sign of life
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "hang":
            hang_here()
        if what == "refuse":
            print("trimtab sft: error: a mistake", file=sys.stderr)
            raise SystemExit(2)
        if what == "finish late":  # the others wait for longer than they may stand still
            for _ in range(20):
                time.sleep(0.1)
                own_heartbeat.move()
            (folder / "done").touch()
        return
    if what == "finish":
        return
    with own_heartbeat.waiting():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (more and (folder / "done").exists()):
            time.sleep(0.05)
            if what == "kill" and more and not is_alive(folder / f"began{rank}"):
                raise ConnectionError("closed by peer")


def is_alive(note: Path) -> bool:
    """Whether the process that began with this note still runs, or has not begun yet."""
    if not note.exists() or not note.read_text():
        return True
    try:
        return Path(f"/proc/{note.read_text()}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def hang_here() -> None:
    time.sleep(60)


def leave(note: Path) -> None:
    note.touch()
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
