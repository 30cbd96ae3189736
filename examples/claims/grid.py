"""A grid of jobs: some at a time, some after others, within a limit of time, all results in one file.

A job is a command with a name. It may need other jobs (an SFT before the RL that starts from it). While it works it
may tell results, a row at a time, so that a job that is cut off leaves what it knew:

    import grid
    grid.tell(step=20, accuracy=0.4)                        # in the job

    jobs = [grid.Job("sft", [...], product="runs/sft"), grid.Job("grpo-1", [...], needs=("sft",), seconds=90)]
    grid.run(jobs, "runs", at_once=8, limit=560)             # in the script that has the grid

`runs/results.jsonl` then holds the rows of all jobs; each also says its job, how that ended (`done`, `cut`, `failed`)
and after how many seconds. What is done there already is not run again, so a grid may be spread over several sittings:
keep that file. A job whose product (a trained model, say) is gone since is run again if another job needs it. Rows of
jobs that this grid does not have stay in the file. `runs/NAME.log` is what a job printed.

Jobs that are Python scripts are forks of one process that has imported everything (forks.py), where that works, and
otherwise processes of their own, as all other commands are.

Left out: several machines, and a share of the device for each job. All jobs that work at once share one device.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import forks

ROWS = "GRID_ROWS"  # names, in a job's environment, the file that it tells its rows to


@dataclass(frozen=True)
class Job:
    name: str
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    """Names of jobs that must be done first."""
    seconds: float = 0
    """About how long it takes: it is not begun where less is left, and the estimate of what remains comes from it."""
    product: str | Path | None = None
    """What other jobs need of it: a file or folder. Unset: they need nothing but its having been done."""


def tell(**row: object) -> None:
    """One row of results, at once on disk. Outside of a grid it is printed."""
    line = json.dumps(row)
    if ROWS not in os.environ:
        print(line, flush=True)
        return
    with open(os.environ[ROWS], "a") as file:
        file.write(line + "\n")


def read(path: str | Path) -> list[dict]:
    """The rows of a file of results; none if it is not there. A last line without its end is not read: whoever wrote
    it was ended meanwhile."""
    path = Path(path)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(jobs: Sequence[Job], folder: str | Path, *, at_once: int = 1, limit: float = 3600) -> list[str]:
    """Run what is not done yet; the names of jobs that are not done in the end."""
    grid = _Grid(jobs, Path(folder), at_once, limit)
    grid.warm_up()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no job outlives it
    try:
        grid.work()
    finally:
        grid.cut_off()
        signal.signal(signal.SIGTERM, before)
    return grid.report()


def is_script(command: Sequence[str]) -> bool:
    """Whether it is a file of Python, run by the Python that runs this."""
    return len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py")


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen | forks.Fork
    begun: float


class _Grid:
    def __init__(self, jobs: Sequence[Job], folder: Path, at_once: int, limit: float):
        known = {job.name for job in jobs}
        assert len(known) == len(jobs), "two jobs have one name"
        for job in jobs:
            assert known.issuperset(job.needs), f"{job.name} needs {job.needs}, which are not all in the grid"
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.at_once, self.limit = folder, at_once, limit
        self.results = folder / "results.jsonl"
        self.begun = time.monotonic()
        self.forks = False
        self.running: list[_Running] = []
        self.took: list[tuple[float, float]] = []  # expected and real seconds of what has ended
        recorded = {row["job"] for row in read(self.results) if row["state"] == "done"}
        self.done = {job.name for job in jobs if job.name in recorded}
        self.wanted = {job.name for job in jobs} - self.done
        self.waiting = [job for job in jobs if job.name not in self.done or self._must_be_made_again(job, jobs)]
        self.done -= {job.name for job in self.waiting}
        self.failed: set[str] = set()
        self.print(f"{len(self.done)} jobs done before, {len(self.waiting)} to do, {at_once} at once")

    def warm_up(self) -> None:
        if any(is_script(job.command) for job in self.waiting):
            self.forks = forks.ready()
            self.print("jobs are forks of this process" if self.forks else "jobs are processes of their own")

    def work(self) -> None:
        while self.waiting or self.running:
            self._begin_what_can()
            if not self.running or self.left() <= 0:
                return
            time.sleep(0.1)
            for running in [one for one in self.running if one.process.poll() is not None]:
                self._end(running, "done" if running.process.poll() == 0 else "failed")

    def cut_off(self) -> None:
        """End what still works: ask, wait a little, end. What it told is kept; it is begun anew in another sitting."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for running in self.running:
                if running.process.poll() is None:
                    os.killpg(running.process.pid, signal_number)
            patience = time.monotonic() + 3
            while time.monotonic() < patience and any(one.process.poll() is None for one in self.running):
                time.sleep(0.1)
        for running in list(self.running):
            self._end(running, "cut")

    def report(self) -> list[str]:
        missing = sorted(self.wanted - self.done)
        self.print(f"not done: {', '.join(missing)}" if missing else "all done")
        return missing

    def left(self) -> float:
        return self.limit - (time.monotonic() - self.begun)

    def print(self, words: str) -> None:
        print(f"{time.monotonic() - self.begun:6.0f} s  {words}", flush=True)

    def _must_be_made_again(self, job: Job, jobs: Sequence[Job]) -> bool:
        gone = job.product is not None and not Path(job.product).exists()
        users = [other for other in jobs if job.name in other.needs]
        return gone and any(user.name in self.wanted or self._must_be_made_again(user, jobs) for user in users)

    def _begin_what_can(self) -> None:
        for job in list(self.waiting):
            if self.failed.intersection(job.needs):
                self.failed.add(job.name)
                self.waiting.remove(job)
                self.print(f"{job.name} left out: what it needs has failed")
            elif len(self.running) < self.at_once and self.done.issuperset(job.needs) and self.left() >= job.seconds:
                self.waiting.remove(job)
                self._begin(job)

    def _begin(self, job: Job) -> None:
        rows = self._rows(job)
        rows.unlink(missing_ok=True)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment = {"OMP_NUM_THREADS": str(max(1, cores // self.at_once))} | os.environ | {ROWS: str(rows.resolve())}
        path = self.folder / f"{job.name}.log"
        process: subprocess.Popen | forks.Fork
        with path.open("w") as log:
            log.write(f"{' '.join(job.command)}\n")
            log.flush()
            if self.forks and is_script(job.command):
                process = forks.Fork(job.command[1:], path, environment)
            else:
                process = subprocess.Popen(
                    job.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
        self.running.append(_Running(job, process, time.monotonic()))

    def _end(self, running: _Running, state: str) -> None:
        job, seconds = running.job, time.monotonic() - running.begun
        self.running.remove(running)
        told = read(self._rows(job)) or [{}]
        self._rows(job).unlink(missing_ok=True)
        about = {"job": job.name, "state": state, "seconds": round(seconds, 1)}
        told = [about | row | about for row in told]
        rows = [row for row in read(self.results) if row["job"] != job.name] + told
        partial = self.results.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(self.results)
        if state == "done":
            self.done.add(job.name)
            self.took.append((job.seconds, seconds))
        elif state == "failed":
            self.failed.add(job.name)
        self.print(f"{job.name} {state} after {seconds:.0f} s; {self._outlook()}")
        if state == "failed":
            log = (self.folder / f"{job.name}.log").read_text().splitlines()
            print("\n".join(f"        {line}" for line in log[-5:]), file=sys.stderr, flush=True)

    def _outlook(self) -> str:
        words = f"{len(self.running)} at work, {len(self.waiting)} wait"
        expected, real = (sum(column) for column in zip(*self.took, strict=True)) if self.took else (0, 0)
        if not expected:
            return words
        now = time.monotonic()
        begun = sum(max(0, one.job.seconds * real / expected - (now - one.begun)) for one in self.running)
        remaining = begun + sum(job.seconds for job in self.waiting) * real / expected
        return f"{words}, about {remaining / self.at_once:.0f} s to go ({max(0, self.left()):.0f} s allowed)"

    def _rows(self, job: Job) -> Path:
        return self.folder / f"{job.name}.rows"
