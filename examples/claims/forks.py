"""Scripts in forks of this process, which has imported what they import: to start Python and import torch anew takes
several seconds of a core, for every job.

    if forks.ready():
        fork = forks.Fork(["script.py", "--words"], "script.log", {"NAME": "value"})
        while fork.poll() is None: ...

Nothing may touch the accelerator or compute a tensor before the forks: neither its driver nor the threads of OpenMP
outlive a fork. So a process that has torch already, and may have used it, is not ready. What a fork prints goes to its
log, and it leads a process group of its own.
"""

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

FOUND = 60.0  # seconds for a fork to find the device
IMPORTED = (
    *("transformers.models.llama.modeling_llama", "trimtab.api", "trimtab.report.page"),
    *("trimtab.cli.train_tail", "trimtab.cli.train_rm", "trimtab.cli.evaluate_gcg_sz"),
    *("trimtab.train.supervised_tasks", "trimtab.train.rl", "trimtab.train.tail"),
    *("trimtab.evaluate.generation", "trimtab.evaluate.generation", "trimtab.evaluate.gcg_attack"),
)

_context = multiprocessing.get_context("fork") if "fork" in multiprocessing.get_all_start_methods() else None


@functools.cache
def ready() -> bool:
    """Import everything; whether the accelerator, or the CPU, then works in a fork."""
    if _context is None or "torch" in sys.modules:
        return False
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask whether a device is there touches nothing
    try:
        for name in IMPORTED:
            importlib.import_module(name)
    except ImportError:
        return False  # a job that needs it says so in its log
    gc.collect()
    gc.freeze()  # what all share is not looked through, and so not copied, by each
    trial = _context.Process(target=_compute)
    trial.start()
    trial.join(FOUND)
    if trial.exitcode is None:
        trial.kill()
        trial.join()
    return trial.exitcode == 0


class Fork:
    """`python COMMAND...` without the start: the first word is a script."""

    def __init__(self, command: Sequence[str], log: str | Path, environment: dict[str, str]):
        assert _context is not None
        self._process = _context.Process(target=_alone, args=(lambda: _script(command), Path(log), environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with contextlib.suppress(OSError):  # it does the same, and one of the two is first
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """Its exit code; None while it works."""
        return self._process.exitcode


def _alone(work: Callable[[], None], log: Path, environment: dict[str, str]) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's ends all jobs
    os.environ.update(environment)
    if (torch := sys.modules.get("torch")) is not None and "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # which was read when torch was loaded
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Not closed here: how it ended is said there afterwards.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    work()


def _script(command: Sequence[str]) -> None:
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def _compute() -> None:
    import torch

    from trimtab.distributed.device import find_device

    try:
        found = torch.ones(8, device=find_device().torch).sum().item()
    except Exception:
        traceback.print_exc(limit=1)
        raise SystemExit(1) from None
    raise SystemExit(int(found != 8))
