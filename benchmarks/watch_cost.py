"""What `trimtab watch` costs the run it looks at: the same run with a watcher and without, in turns.

    python benchmarks/watch_cost.py                  # two cores, about four minutes
    python benchmarks/watch_cost.py --every 0.2      # a watcher that looks ten times as often
    python benchmarks/watch_cost.py --page           # the live page, with somebody who has it open

The run is GRPO on the embedded game, whose answers are conversations. The first iterations are left out, and of the
others the median counts. A terminal is a real one (a pty), so that everything is drawn. What else the machine does
falls on both alike: a pair is of neighbours in time, and who goes first changes.
"""

import argparse
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import httpx

from trimtab.embedded.guess_game import write

LEFT_OUT = 3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32, help="of an iteration; eight episodes each")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--page", action="store_true", help="the page instead of the terminal")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder / "game")
        ratios = []
        for pair in range(options.pairs):
            seconds = {}
            for watched in (False, True) if pair % 2 == 0 else (True, False):
                name = f"{pair}-{'watched' if watched else 'alone'}"
                seconds[watched], used = measured(folder, name, options, watched)
                print(f"{name:<10} {seconds[watched]:.4f} s an iteration{used}", flush=True)
            ratios.append(seconds[True] / seconds[False])
        told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"watched / alone: median {median(ratios):.3f} ({told})")


def measured(folder: Path, name: str, options: argparse.Namespace, watched: bool) -> tuple[float, str]:
    """Median seconds of an iteration, and what the watcher used."""
    run = folder / name
    log = (folder / f"{name}.log").open("w")
    training = subprocess.Popen(command("grpo", *run_words(folder, run, options)), stdout=log, stderr=log)
    used = ""
    if watched:
        words = ["--wait", "--every", str(options.every), *(["--page"] if options.page else [])]
        began = time.monotonic()
        watcher, screen = pty.fork()
        if not watcher:
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
            os.execv(sys.executable, command("watch", str(run), *words))
        drawn = Reader(screen) if options.page else Screen(screen)
        training.wait()
        cpu, wall = cpu_seconds(watcher), time.monotonic() - began
        os.kill(watcher, signal.SIGTERM)
        os.waitpid(watcher, 0)
        drawn.join()
        used = f"; the watcher used {cpu:.2f} s of a core in {wall:.0f} s and drew {drawn.written / 1000:,.0f} kB"
    if training.wait():
        raise SystemExit(f"the run failed: {(folder / f'{name}.log').read_text()[-2000:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return median(row["seconds"] for row in rows[LEFT_OUT:]), used


def run_words(folder: Path, run: Path, options: argparse.Namespace) -> list[str]:
    words = "--environment trimtab:guess --apply_chat_template --n_samples_per_prompt 8 --use_dynamic_batch"
    words += " --generate_max_len 4 --actor_learning_rate 3e-3 --init_kl_coef 0"
    words += f" --rollout_batch_size {options.prompts} --train_batch_size {8 * options.prompts}"
    words += f" --env_rows {options.prompts * options.iterations}"
    return ["--pretrain", str(folder / "game" / "model"), "--save_path", str(run), *words.split()]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "trimtab.cli.main", *words]


def cpu_seconds(process: int) -> float:
    """What a process has used of a core so far, start-up included (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Screen(threading.Thread):
    """Takes what a terminal is told, and counts it."""

    def __init__(self, descriptor: int):
        super().__init__(daemon=True)
        self.descriptor, self.written = descriptor, 0
        self.start()

    def run(self) -> None:
        while True:
            try:
                self.written += len(os.read(self.descriptor, 1 << 16))
            except OSError:  # the other end is closed
                return


class Reader(Screen):
    """Has the page open whose address a terminal is told, and counts what comes of it."""

    def run(self) -> None:
        told = b""
        while b"\n" not in told:
            told += os.read(self.descriptor, 1 << 16)
        place = next(word for word in told.decode().split() if word.startswith("http://"))
        with suppress(httpx.HTTPError), httpx.stream("GET", f"{place}/run/1/events", timeout=None) as reply:
            for part in reply.iter_bytes():
                self.written += len(part)


if __name__ == "__main__":
    main()
