"""The whole table: everything is imported once, then every row runs in a fork with a limit of its own.

Nothing may touch the accelerator before the forks. Rows that find no time left are left out, so the most important come
first. Rows go to standard output as they are known, what else scripts say to FOLDER/texts. What stands beside FOLDER in
`before` is the package as it was, for the picture of a step.

    python benchmarks/h200/everything.py FOLDER [--seconds 520] [--tiny] [--only grpo,sft]
"""

import argparse
import contextlib
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether a device is there leaves forks alone
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LORA = "--lora_rank 16 --compile on --gradient_checkpointing"
FEWER = f"{LORA} --gradient_checkpointing_layers auto"
ROWS: list[tuple[str, int, list[str]]] = [  # a name, seconds, a script and its words
    ("update", 40, ["update"]),
    ("sft", 75, ["sft", "--steps", "4", "--peer_steps", "2"]),
    ("grpo", 90, ["profile_step", "record", "FOLDER/after.json"]),
    ("grpo_kl", 110, ["grpo", "--kl", "0.01", "--steps", "3", "--peer_steps", "2"]),
    ("rollouts", 55, ["rollouts", "360M:64x512,512x512", "1.7B:32x512,256x512", "--peer", "no"]),
    ("rollouts_8b", 80, ["rollouts", "8B:64x512,256x512", "--lora", "16", "--repeats", "2", "--peer", "no"]),
    ("gcg", 25, ["gcg"]),
    ("grpo_8b", 220, ["grpo", "--shape", "8B", "--steps", "2", "--peer", "no", "--ours", FEWER]),
    ("grpo_1.7b", 190, ["grpo", "--shape", "1.7B", "--steps", "3", "--peer_steps", "2"]),
    ("dpo", 60, ["dpo", "--steps", "3", "--peer_steps", "2"]),
    ("grpo_8b_all", 125, ["grpo", "--shape", "8B", "--steps", "2", "--peer", "no", "--ours", LORA]),
    ("before", 45, ["profile_step", "record", "FOLDER/before.json", "--package", "FOLDER/../before", "--ours", ""]),
    ("ppo", 180, ["ppo", "--steps", "3"]),
    ("cost", 90, ["cost", "FOLDER/cost.png", "--repeats", "1"]),
    ("long_1.7b", 50, ["rollouts", "1.7B:256x2048", "--peer", "no"]),
    ("long_360m", 65, ["rollouts", "360M:512x4096", "--peer", "no"]),
]  # fmt: skip


def import_everything() -> None:
    import datasets  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    import trl  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, SFTTrainer  # noqa: F401

    for name in ("grpo", "sft", "dpo", "ppo", "rollouts", "update", "gcg", "cost", "profile_step"):
        importlib.import_module(name)
    for name in ("grpo", "sft", "dpo", "ppo"):
        importlib.import_module(f"trimtab.cli.train_{name}")
    for name in ("supervised", "rl.loop", "rl.roles"):
        importlib.import_module(f"trimtab.train.{name}")
    assert not torch.cuda.is_initialized(), "a device was touched before the forks"


def can_fork() -> bool:
    """Whether the accelerator works in a fork; else every row is a process that imports everything anew."""
    if (child := os.fork()) == 0:
        try:
            import torch

            from trimtab.distributed.device import find_device

            os._exit(int(torch.ones(8, device=find_device().torch).sum().item() != 8))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_row(name: str, seconds: float, words: list[str], texts: Path, fork: bool) -> str:
    """Run a script's main in a child and wait for it; what became of it."""
    sys.stdout.flush()
    if not fork:
        with (texts / f"{name}.txt").open("w") as text:
            script = [sys.executable, str(Path(__file__).parent / f"{words[0]}.py"), *words[1:]]
            child = subprocess.Popen(script, stderr=text, start_new_session=True).pid
    elif (child := os.fork()) == 0:
        code = 1
        try:
            os.setsid()
            with (texts / f"{name}.txt").open("w") as text:
                os.dup2(text.fileno(), 2)
            importlib.import_module(words[0]).main(words[1:])
            code = 0
        except BaseException:
            traceback.print_exc()
            print(f"{name}: {traceback.format_exc().strip().splitlines()[-1][:300]}", flush=True)
        finally:
            sys.stdout.flush()
            os._exit(code)
    until, ended = time.monotonic() + seconds, "out of time"
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            ended = f"exit {os.waitstatus_to_exitcode(status)}"
            break
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what it has started
    if ended == "out of time":
        os.waitpid(child, 0)
    return ended


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="names of rows, by commas")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    texts = arguments.folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")  # nothing is at work in its threads
    import_everything()
    gc.collect()
    gc.freeze()  # a peer collects garbage at every step: what was imported here shall not cost it anything
    fork = can_fork()
    print(f"imported in {time.monotonic() - began:.0f} s, {'forks' if fork else 'processes'}", flush=True)
    models = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        for name, most, words in ROWS:
            if arguments.only and name not in arguments.only.split(","):
                continue
            left = arguments.seconds - (time.monotonic() - began)
            if left < 15 and not arguments.tiny:
                print(f"== {name}: left out, no time", flush=True)
                continue
            words = [word.replace("FOLDER", str(arguments.folder)) for word in words]
            more = ["--folder", str(models), *(["--tiny"] if arguments.tiny else [])]
            print(f"== {name}: {' '.join(words)}", flush=True)
            start = time.monotonic()
            ended = run_row(name, min(most, left), [*words, *more], texts, fork)
            print(f"== {name}: {ended} after {time.monotonic() - start:.0f} s", flush=True)
            for scratch in models.iterdir():  # models stay, what runs have saved does not
                if not scratch.name.startswith(("model-", "reward-")):
                    shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink()
    finally:
        shutil.rmtree(models, ignore_errors=True)


if __name__ == "__main__":
    main()
