"""Runs golden jobs with the package that is on the path: one warm parent, a forked child for every job.

Reads a job a line from standard input, writes a line for each. Nothing but torch and transformers is imported before
the fork, so this file needs nothing of the package's insides.
"""

import itertools
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import peft  # noqa: F401
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

LIMIT = 300  # seconds of a job


def stop_after_rows(name: str, rows: int) -> None:
    """End this process with a signal as soon as its metrics have so many rows."""
    metrics = Path("out/metrics.jsonl")
    while not metrics.exists() or metrics.read_text().count("\n") < rows:
        time.sleep(0.01)
    os.kill(os.getpid(), getattr(signal, name))


def stop_in_backward(name: str, number: int) -> None:
    """End this process with a signal in its backward pass of this number: inside an update."""
    plain, calls = torch.Tensor.backward, itertools.count(1)

    def is_trial() -> bool:
        """Whether a check before the first step calls, which other versions of the package may lack."""
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.endswith("train/proof.py"):
            frame = frame.f_back
        return frame is not None

    def backward(tensor: torch.Tensor, *given, **more) -> None:
        if not is_trial() and next(calls) == number:
            os.kill(os.getpid(), getattr(signal, name))
        plain(tensor, *given, **more)

    torch.Tensor.backward = backward


def child(job: dict) -> int:
    os.makedirs(job["folder"], exist_ok=True)
    os.chdir(job["folder"])
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.update(job["environment"], GOLDEN_PID=str(os.getpid()), GOLDEN_CALLS=os.path.abspath("calls"))
    signal.alarm(LIMIT)
    name, kind, number = job["environment"].get("GOLDEN_STOP", "none none 0").split()
    if kind == "rows":
        threading.Thread(target=stop_after_rows, args=(name, int(number)), daemon=True).start()
    if kind == "backward":
        stop_in_backward(name, int(number))
    torch.set_num_threads(1)
    if job["program"]:
        import trimtab  # noqa: F401

        sys.path.remove(os.environ["PYTHONPATH"])  # a run that is given a class keeps the path, and a digest of it
        runpy.run_path(job["program"], run_name="__main__")
        return 0
    from trimtab.cli.main import main

    return main(job["command"].split())


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(job)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    main()
