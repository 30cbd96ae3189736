"""Seconds from a GRPO command to the end of its first update, with nothing compiled before, beside another version.

The commands are those of grpo.py. Each runs in a process of its own with empty folders for what Triton and torch
compile, and again with full ones. Versions take turns. Python's own bytecode is there, as after an installation, and
a warm-up run of each version has read all files from the disk.

    git worktree add /tmp/before 947d48f1
    python benchmarks/h200/first_update.py --shape 360M --before /tmp/before --before_ours "--compile on"
    LORA="--lora_rank 16 --gradient_checkpointing --gradient_checkpointing_layers auto"
    python benchmarks/h200/first_update.py --shape 8B --ours "$LORA" --before /tmp/before --before_ours "$LORA"

`--before_ours` given twice: the other version runs with each.
"""

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpo
from runs import Bench

HERE = Path(__file__).resolve().parents[2]
CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


def options(parser: argparse.ArgumentParser) -> None:
    grpo.options(parser)
    parser.add_argument("--before", type=Path, help="a folder with another version of Trimtab")
    parser.add_argument("--before_ours", action="append", help="more options of its command")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a command")
    parser.add_argument("--cold", action="store_true", help="only with nothing compiled")


def seconds_to_first_update(words: str, tree: Path, caches: Path, limit: float) -> tuple[float, dict]:
    """And the first row of metrics."""
    environment = os.environ | dict.fromkeys(CACHES, str(caches)) | {"PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory(dir=caches.parent) as out:
        metrics, log = Path(out, "metrics.jsonl"), Path(out, "log")
        command = [sys.executable, "-m", "trimtab.cli.main", "grpo", *words.split(), "--save_path", out]
        with log.open("w") as file:
            began = time.perf_counter()
            run = subprocess.Popen(command, env=environment, cwd=tree, stdout=file, stderr=file)
        try:
            while not (metrics.exists() and metrics.read_text().count("\n")):
                if run.poll() is not None or time.perf_counter() - began > limit:
                    raise RuntimeError(f"no update: {log.read_text()[-600:]}")
                time.sleep(0.02)
            return time.perf_counter() - began, json.loads(metrics.read_text().splitlines()[0])
        finally:
            run.kill()
            run.wait()


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    given, task = bench.arguments, grpo.Task(bench)
    words = task.words(2, given.kl) + ("" if bench.tiny else " --bf16")
    bench.release()
    versions = {"": (HERE, " ".join(given.ours or []))}
    if given.before is not None:
        others = given.before_ours or [""]
        versions |= {" ".join(["before", more]).strip(): (given.before.resolve(), more) for more in others}
    for name, (tree, more) in versions.items():
        compileall.compile_dir(tree / "trimtab", quiet=2)
        with bench.attempt(f"warm-up {name}"), tempfile.TemporaryDirectory(dir=bench.folder) as caches:
            seconds_to_first_update(f"{words} {more}", tree, Path(caches), given.limit)
    for state in ("nothing compiled", "compiled before")[: 1 if given.cold else 2]:
        for name, (tree, more) in versions.items():
            with bench.attempt(f"{name} {state}"):
                caches = bench.folder / f"compiled-{name.replace(' ', '')}"
                caches.mkdir(exist_ok=True)
                seconds, row = seconds_to_first_update(f"{words} {more}", tree, caches, given.limit)
                bench.say(
                    f"{name or 'this version'}, {state}: {seconds:.1f} s, of them {row['seconds']:.1f} s an update"
                )
                bench.row(
                    f"first update, GRPO {given.shape}", version=name or "this", options=more, state=state,
                    seconds=seconds, step=row["seconds"],
                )  # fmt: skip


if __name__ == "__main__":
    main()
