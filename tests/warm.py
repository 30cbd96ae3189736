"""Commands in processes that can be killed, forked from one warm parent: importing torch again and again is slow.

The parent imports everything and computes no tensors, because OpenMP's threads do not survive a fork.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import peft  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import trimtab.evaluate.generation
import trimtab.report.page
import trimtab.train.rl
import trimtab.train.supervised_tasks
import trimtab.train.tail  # noqa: F401
from tests.config.every_job import EVERY_JOB
from trimtab.config.option import options_of

# What every command would find out again.
for job in EVERY_JOB:
    options_of(job)
get_checkpoint_conversion_mapping("llama")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.warm"])
_ROOT = Path(__file__).parents[1]
MORE_TO_TELL = 10  # seconds


def _start(process) -> None:
    """The warm parent is started with the first process, and finds these modules only from the project's folder; a test
    may have gone elsewhere."""
    here = os.getcwd()
    os.chdir(_ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
    process.start()


def start(
    argv: list[str],
    *,
    prepare: Callable[[], None] | None = None,
    log: Path | None = None,
    environment: dict[str, str] | None = None,
    limit: float | None = None,
):
    """Start `trimtab ARGV` in a process of its own; `prepare` runs in it first. After `limit` seconds it tells where
    each of its threads is, and ends with 1."""
    process = _context.Process(target=_main, args=(argv, prepare, log, os.environ | (environment or {}), limit))
    _start(process)
    return process


def run(argv: list[str], *, limit: float | None = None, **options) -> int:
    """`limit`: see start; then whatever the command had started ends with it, too."""
    process = start(argv, limit=limit, **options)
    if limit is not None:
        process.join(limit + MORE_TO_TELL)
        if process.is_alive():
            process.kill()
    process.join()
    if limit is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.exitcode


def output(argv: list[str], code: int = 0, **options) -> str:
    """What `trimtab ARGV` prints; it must end with this exit code."""
    return _outputs(lambda log: [run(argv, log=log, **options)], [code])[0]


def world_outputs(argv: list[str], size: int, codes: int | list[int] = 0, **options) -> list[str]:
    """The same of every process of a world; `codes`: one for all of them, or one for each."""
    expected = [codes] * size if isinstance(codes, int) else codes
    return _outputs(lambda log: run_world(argv, size, log=log, **options), expected)


def _outputs(run: Callable[[Path], list[int]], codes: list[int]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder) / "log")
        printed = [path.read_text() for path in sorted(Path(folder).iterdir())]
    assert found == codes, (found, *printed)
    return printed


def kill(*processes) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def call(function: Callable, *arguments) -> int:
    """Run a function of a test module in a process of its own; its exit code."""
    process = start_call(function, *arguments)
    process.join()
    return process.exitcode


def start_call(function: Callable, *arguments):
    process = _context.Process(target=_call, args=(function, {}, arguments))
    _start(process)
    return process


def call_world(function: Callable, size: int, *arguments) -> list[int]:
    """The same in several processes that find each other."""
    processes = start_calls(function, size, *arguments)
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def start_calls(function: Callable, size: int, *arguments) -> list:
    shared = _world(size)
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    processes = [_context.Process(target=_call, args=(function, rank, arguments)) for rank in ranks]
    for process in processes:
        _start(process)
    return processes


def _call(function, environment, arguments):
    _end_with_parent()
    os.environ.update(environment)
    function(*arguments)


def _world(size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def start_world(argv: list[str], size: int, *, log: Path | None = None, prepare: dict | None = None) -> list:
    """Start `trimtab ARGV` as a world of processes; `prepare` maps ranks to what runs in them first."""
    shared = _world(size)
    return [
        start(
            argv,
            prepare=(prepare or {}).get(rank),
            log=log and log.with_name(f"{log.name}.{rank}"),
            environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]


def run_world(argv: list[str], size: int, **options) -> list[int]:
    processes = start_world(argv, size, **options)
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def wait_until(condition: Callable[[], bool], process, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.is_alive(), f"ended early with exit code {process.exitcode}"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def _never(*_):
    raise AssertionError("what comes from another process is not unpickled")


def _end_with_parent():
    """A test that is killed takes its processes along: its end is the warm parent's, and that one's is theirs. Each of
    them is given what holds the warm parent alive, for processes of its own."""
    os.close(forkserver._forkserver._forkserver_alive_fd)
    if sys.platform == "linux":
        set_signal_at_parents_end = 1
        ctypes.CDLL(None).prctl(set_signal_at_parents_end, signal.SIGKILL)


def _main(argv, prepare, log, environment, limit):
    _end_with_parent()
    os.environ.update(environment)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    if limit is not None:
        os.setpgid(0, 0)
        faulthandler.dump_traceback_later(limit, exit=True)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        torch.distributed.distributed_c10d._tensor_to_object = _never
    if prepare is not None:
        prepare()
    from trimtab.cli.main import main

    raise SystemExit(main(argv))
