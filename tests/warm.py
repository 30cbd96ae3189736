"""Commands in processes that can be killed, forked from one warm parent: importing torch again and again is slow.

The parent imports everything and computes nothing, because OpenMP's threads do not survive a fork.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import peft  # noqa: F401

import trimtab.train.sft  # noqa: F401

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.warm"])


def start(argv: list[str], *, prepare: Callable[[], None] | None = None, log: Path | None = None):
    """Start `trimtab ARGV` in a process of its own; `prepare` runs in it first."""
    process = _context.Process(target=_main, args=(argv, prepare, log, dict(os.environ)))
    process.start()
    return process


def run(argv: list[str], **options) -> int:
    process = start(argv, **options)
    process.join()
    return process.exitcode


def wait_until(condition: Callable[[], bool], process, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.is_alive(), f"ended early with exit code {process.exitcode}"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def _main(argv, prepare, log, environment):
    os.environ.update(environment)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    if prepare is not None:
        prepare()
    from trimtab.cli.main import main

    raise SystemExit(main(argv))
