"""Golden runs: the same tiny jobs with the package of another commit and with the working tree, compared bit for bit.

    python -m tests.golden --base COMMIT [--only WORD] [--cache FOLDER]

One line a job; exit code 1 if any differs. Results of BASE are kept in FOLDER (GOLDEN_CACHE, else build/golden), and
each is used again while its job stays as it is. Several working trees can share a FOLDER and run at the same time.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.golden.compare import differences, ledger_problem
from tests.golden.jobs import JOBS, Job

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"


class Package:
    """A warm process that runs jobs with one version of the package, each in a folder of this side."""

    def __init__(self, source: Path, side: Path):
        self.source, self.side = source, side
        names = ("PATH", "HOME", "LANG", "TMPDIR")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"PYTHONPATH": str(source), "TRIMTAB_CACHE": str(side / "cache"), "PYTHONHASHSEED": "0"}
        side.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "worker.py")],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": side, "env": environment},
        )

    def run(self, job: Job, folder: Path, *, stop: str = "", resume: bool = False) -> int:
        """Exit code of the first command that failed, or 0."""
        environment = {"GOLDEN_STOP": stop} if stop else {}
        for words in job.commands or ("",):
            request = {
                "folder": str(folder),
                "command": words + (job.resume if resume else ""),
                "program": job.program,
                "environment": environment,
            }
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())["code"]
            if code:
                return code
        return 0

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--only", default="", help="only the jobs whose name contains this")
    parser.add_argument("--cache", type=Path, help="where BASE's results are kept (GOLDEN_CACHE, else build/golden)")
    chosen = parser.parse_args()
    found = subprocess.run(["git", "rev-parse", f"{chosen.base}^{{commit}}"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        print(f"golden: no commit {chosen.base!r} here; fetch it, or name another with BASE=COMMIT", file=sys.stderr)
        return 2
    jobs = [job for job in JOBS if chosen.only in job.name]
    if not jobs:
        print(f"golden: no job is called {chosen.only!r}; there are {', '.join(j.name for j in JOBS)}", file=sys.stderr)
        return 2
    cache = chosen.cache or Path(os.environ.get("GOLDEN_CACHE") or ROOT / "build" / "golden")
    return _compare(found.stdout.strip(), jobs, cache.resolve())


def _compare(commit: str, jobs: list[Job], cache: Path) -> int:
    place = cache / commit[:12]
    source = place / "package"
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place / "package.lock"):
        if not source.exists():
            _export(commit, source)
        for folder, module in (("data", "tiny_recipes"), ("game", "guess_game")):
            if not (place / folder).exists():
                making = {**os.environ, "PYTHONPATH": str(source)}
                words = [sys.executable, "-P", "-m", f"trimtab.embedded.{module}", f"{folder}.new"]
                subprocess.run(words, cwd=place, env=making, check=True, capture_output=True)
                (place / f"{folder}.new").rename(place / folder)
    # Both names have four letters, so absolute paths differ in nothing but the name, even inside pickled files.
    ours = place / hashlib.sha256(str(ROOT).encode()).hexdigest()[:4]
    base, tree = Package(source, place / "base"), Package(ROOT, ours)
    ready = {job.name: threading.Event() for job in jobs}
    problems: dict[str, str] = {}

    def run_base() -> None:
        for job in jobs:
            try:
                problems[job.name] = _prepare(base, job)
            finally:
                ready[job.name].set()

    worker = threading.Thread(target=run_base)
    worker.start()
    bad = 0
    for number, job in enumerate(jobs, 1):
        lines = _check(base, tree, job, ready[job.name], problems)
        bad += bool(lines)
        print(f"{number:>3}/{len(jobs)}  {'differs' if lines else 'equal  '}  {job.name}", flush=True)
        for line in lines[:6]:
            print(f"          {line}", flush=True)
    worker.join()
    base.close()
    tree.close()
    print(f"{len(jobs) - bad} of {len(jobs)} jobs equal to {commit[:12]}; files in {place}/base and {ours}")
    return 1 if bad else 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _export(commit: str, source: Path) -> None:
    unfinished = source.with_name("package.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit, "trimtab"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(unfinished)], input=archive.stdout, check=True)
    unfinished.rename(source)


def _programs(job: Job) -> list[str]:
    return [*job.files, *([job.program] if job.program else [])]


def _folder(job: Job) -> str:
    """Name of a job's folder: the job, and a hash of all that it consists of."""
    parts = repr(job).encode() + (HERE / "worker.py").read_bytes()
    parts += b"".join((PROGRAMS / name).read_bytes() for name in _programs(job))
    return f"{job.folder}-{hashlib.sha256(parts).hexdigest()[:8]}"


def _source(job: Job) -> Job | None:
    return next((other for other in JOBS if other.name == job.uses), None)


def _fill(base: Package, job: Job, folder: Path) -> None:
    """An empty folder with the job's files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in _programs(job):
        shutil.copy(PROGRAMS / name, folder)
    if (source := _source(job)) is not None:
        shutil.copytree(base.side / _folder(source) / "recorded", folder / "recorded")


def _prepare(base: Package, job: Job) -> str:
    """BASE's part: the whole run, and for a job that is resumed also an interrupted one. Why it failed; empty: not."""
    if (source := _source(job)) is not None and (problem := _prepare(base, source)):
        return problem
    whole = base.side / _folder(job)
    begun, done = whole.with_name(f"{whole.name}.begun"), whole.with_name(f"{whole.name}.done")
    with _locked(whole.with_name(f"{whole.name}.lock")):
        if done.exists():
            return ""
        _fill(base, job, whole)
        if not (job.by_ledger and job.stop) and (code := base.run(job, whole)):
            return f"BASE failed with exit code {code}: {whole}/log.txt"
        if job.stop:
            _fill(base, job, begun)
            code = base.run(job, begun, stop=job.stop)
            if code == 0 and not job.stop.startswith("none"):
                return f"BASE was to be interrupted ({job.stop}), and was not"
            if job.leaves and not any(begun.glob(job.leaves)):
                return f"BASE's interrupted run has left no {job.leaves}"
        done.touch()
    return ""


def _check(base: Package, tree: Package, job: Job, ready: threading.Event, problems: dict[str, str]) -> list[str]:
    """The working tree's part. What differs."""
    theirs, ours = base.side / _folder(job), tree.side / _folder(job)
    shutil.rmtree(ours, ignore_errors=True)
    if job.stop or job.uses:
        ready.wait()
    if not problems.get(job.name):
        if job.stop:
            shutil.copytree(theirs.with_name(f"{theirs.name}.begun"), ours, symlinks=True)
        else:
            _fill(base, job, ours)
        code = tree.run(job, ours, resume=bool(job.stop))
    ready.wait()
    if problems[job.name]:
        return [problems[job.name]]
    if code:
        return [f"the working tree failed with exit code {code}: {ours}/log.txt"]
    if job.by_ledger:
        problem = ledger_problem(ours / "out", bound=job.by_ledger)
        return [problem] if problem else []
    names = {bytes(theirs): bytes(ours), bytes(base.source): bytes(tree.source)}
    return differences(theirs, ours, names, results_only=bool(job.stop), episodes=job.plays)


if __name__ == "__main__":
    raise SystemExit(main())
