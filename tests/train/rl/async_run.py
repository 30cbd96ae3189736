"""Small asynchronous runs through the real command, and what every one of them must have kept to."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path

from tests.train.rl.rl_run import EPISODES, PROMPTS, arguments, rows
from trimtab.train.metrics import read_rows
from trimtab.train.rl.async_worker import AsyncRolloutWorker
from trimtab.train.rl.loop import RLRun

BOUND = 2
# Few places in the engine: when a batch is there, others are in the middle of being written.
AHEAD = f"--async_train --async_staleness {BOUND} --rollout_slots 6 --generate_max_len 24 --save_steps 1 --eval_steps 4"


def words(folder: Path, out: Path, estimator: str, *more: str) -> list[str]:
    return arguments(folder, out, estimator, AHEAD, *more)


def check_ledger(out: Path, *, bound: int = BOUND, places: int = PROMPTS * EPISODES, batch: int = 4) -> list[dict]:
    """Each place of the data once, none too old, in full batches; what was told of age agrees with it."""
    lines = read_rows(out / "ledger.jsonl", key="iteration")
    dropped = ("filtered", "retired")
    settled = sorted(place for line in lines for why in ("trained", *dropped) for place in line.get(why, []))
    assert settled == list(range(places))
    told = {row["step"]: row for row in rows(out) if row["step"] > 0}
    trained = [line for line in lines if line["trained"]]
    assert [line["iteration"] for line in trained] == sorted(told)
    for line in trained:
        ages = [line["iteration"] - 1 - version for version in line["versions"]]
        assert min(ages) >= 0 and max(ages) <= bound
        assert told[line["iteration"]]["age_max"] == max(ages)
        assert len(line["trained"]) == batch or line is trained[-1]
    return lines


def kill_after(seconds: float) -> None:
    """In a process that is to be killed so long after its first iteration has begun."""
    plain = RLRun.run_iterations

    def killed(run, stop):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return plain(run, stop)

    RLRun.run_iterations = killed


def kill_once_there_is(path: Path) -> None:
    """In a process that is to be killed as soon as this file exists."""

    def watch() -> None:
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def tell_while_collecting(number: int, times: int, method: str = "advance") -> None:
    """Send this process a signal when it has asked so often what is written, or called another method of the worker."""
    plain, calls = getattr(AsyncRolloutWorker, method), itertools.count(1)

    def told(worker, *given, **named):
        if next(calls) == times:
            os.kill(os.getpid(), number)
        return plain(worker, *given, **named)

    setattr(AsyncRolloutWorker, method, told)
