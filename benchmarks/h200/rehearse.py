"""One rank of large runs on one device: planned and rehearsed memory and time, one row of a table a case.

The ratios should be within 10 % (planned / rehearsed GiB) and 25 % (seconds of a step). Every case is a command of its
own with a time limit, and all of them have another. What they print goes to FOLDER, if one is given.
Arithmetic of a row is that of three steps; samples are such that it takes a minute or less on an H200.

    python benchmarks/h200/rehearse.py [--seconds 170] [--limit 580] [--only 70B] [--folder FOLDER] [--tiny]
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SFT = "--bf16 --gradient_checkpointing --max_len 8192 --packing_samples --train_max_tokens_per_gpu 8192"
SHORT = SFT.replace("8192", "4096")
GRPO = (
    "--bf16 --gradient_checkpointing --prompt_max_len 1024 --generate_max_len 1024 --n_samples_per_prompt 8"
    " --use_dynamic_batch --train_max_tokens_per_gpu 16384 --init_kl_coef 0.01 --rollout_batch_size 64"
    " --train_batch_size 512"
)
CASES = {  # those that matter most first: there may be no time for all
    "70B on 64, ZeRO 3": f"sft --pretrain 70B --rehearse 64 --zero_stage 3 --train_batch_size 64 {SFT}",
    "70B GRPO with reference on 64, tensor 8": (
        f"grpo --pretrain 70B --rehearse 64 --ds_tensor_parallel_size 8 --zero_stage 3 {GRPO}"
    ),
    "405B on 512, ZeRO 3": f"sft --pretrain 405B --rehearse 512 --zero_stage 3 --train_batch_size 512 {SHORT}",
    "8x22B on 64, ZeRO 3": f"sft --pretrain 8x22B --rehearse 64 --zero_stage 3 --train_batch_size 64 {SFT}",
    "70B on 64, tensor 8 x data 8": (
        f"sft --pretrain 70B --rehearse 64 --ds_tensor_parallel_size 8 --zero_stage 3 --train_batch_size 16 {SFT}"
    ),
    "8B on 8, ZeRO 3": f"sft --pretrain 8B --rehearse 8 --zero_stage 3 --train_batch_size 16 {SFT}",
}


# Small models of the same names.
SHRINK = """
import sys
from trimtab.plan import hardware, workload
for sizes in (workload._LLAMAS, workload._MIXTRALS):
    sizes.update(dict.fromkeys(sizes, (64, 128, 2, 8, 8, 512)))
hardware.total_memory = lambda _: 2**40
from trimtab.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def tiny(words: str) -> str:
    """The same layout of a short job, to try the script without such a device."""
    words = re.sub(r"--max_len \d+ --packing_samples --train_max_tokens_per_gpu \d+", "--max_len 16", words)
    words = re.sub(r"_max_len 1024", "_max_len 8", words).replace("--train_max_tokens_per_gpu 16384", "")
    return words.replace("--use_dynamic_batch", "")


def figure(said: str, pattern: str) -> str:
    found = re.search(pattern, said)
    return found[1] if found else "-"


HEADING = (
    f"| {'case':<40} | planned GiB | rehearsed GiB | ratio | planned s | rehearsed s | ratio | arithmetic s | whole |"
)


def ratio(first: str, second: str) -> str:
    return "-" if "-" in (first, second) or float(second) == 0 else f"{float(first) / float(second):.2f}"


def row_of(name: str, command: list[str], seconds: float, log: Path) -> str:
    began, code = time.monotonic(), None
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said, took = log.read_text(errors="replace"), f"{time.monotonic() - began:.0f} s"
    if code != 0:
        last = " / ".join(line.strip() for line in said.strip().splitlines()[-3:])
        return f"| {name:<40} | {'stopped' if code is None else f'exit {code}'} after {took}: {last[-500:]}"
    planned, rehearsed = figure(said, r"trimtab plan: ([\d.]+)\)\n\nseconds"), figure(said, r"\n  peak +([\d.]+)")
    seconds = figure(said, r"while layers work \(trimtab plan: ([\d.e+-]+)\)")
    step = figure(said, r"time of a step ([\d.e+-]+) s")
    cells = [
        (11, planned),
        (13, rehearsed),
        (5, ratio(planned, rehearsed)),
        (9, seconds),
        (11, step),
        (5, ratio(seconds, step)),
        (12, figure(said, r"\n  whole +([\d.e+-]+)")),
        (5, took),
    ]
    return " | ".join([f"| {name:<40}", *(f"{cell:>{width}}" for width, cell in cells)]) + " |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=170, help="limit of a case")
    parser.add_argument("--limit", type=float, default=580, help="limit of all of them")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--folder", type=Path, help="for what the commands print")
    parser.add_argument("--tiny", action="store_true", help="short rows: does it run?")
    arguments = parser.parse_args(argv)
    until = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{HEADING}\n|{'---|' * 9}", flush=True)
        for name, words in CASES.items():
            if arguments.only not in name:
                continue
            seconds, log = min(arguments.seconds, until - time.monotonic()), re.sub(r"[^A-Za-z0-9]+", "-", name)
            if seconds < 20:
                print(f"| {name:<40} | left out, no time", flush=True)
                continue
            called = (
                ["-c", SHRINK, *tiny(words).split()] if arguments.tiny else ["-m", "trimtab.cli.main", *words.split()]
            )
            print(row_of(name, [sys.executable, *called], seconds, folder / f"{log}.txt"), flush=True)


if __name__ == "__main__":
    main()
