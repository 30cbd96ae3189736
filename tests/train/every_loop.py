"""Small runs of the three loops: over fixed data, of RL, and of the tail methods."""

import os
from pathlib import Path

from tests.train.job_run import write_rows
from tests.train.jobs import write_job
from tests.train.rl import rl_run
from tests.train.tail import tail_run
from trimtab.embedded.sort_task import make_rows
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.rl.loop import RLRun
from trimtab.train.supervised import SupervisedRun
from trimtab.train.tail.tail_run import TailRun

LOOPS = ["sft", "ppo", "tail"]
STEPS = 12  # of sft: 24 samples, 4 a step, two epochs


def write_tasks(folder: Path) -> None:
    """Models and data of all of them."""
    write_job(folder, "sft", rows=24, attention_dropout=0.1)
    write_rows(folder / "more.jsonl", make_rows(5, seed=2))
    rl_run.write_task(folder, attention_dropout=0.1)


def words(folder: Path, loop: str, out: Path, *more: str) -> list[str]:
    """`loop`: sft, an estimator of RL, or "tail" with the name of a method (none: repulse)."""
    if loop.startswith("tail"):
        return tail_run.arguments(folder, out, loop.removeprefix("tail").strip() or "repulse", *more)
    if loop in rl_run.ESTIMATORS:
        return rl_run.arguments(folder, out, loop, *more)
    fixed = (
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --eval_dataset {folder}/more.jsonl "
        f"--train_batch_size 4 --micro_train_batch_size 2 --max_epochs 2 --max_len 40 --save_steps 3 "
        f"--learning_rate 1e-2 --lr_warmup_ratio 0 --save_path {out} --ckpt_path {out}/checkpoints"
    )
    return [*fixed.split(), *" ".join(more).split()]


def store(place: Path) -> Checkpoints:
    return Checkpoints(place, keep=3, keep_gib=1e8)


def step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("global_step"))


def newest_first(place: Path) -> list[Path]:
    return sorted(place.glob("global_step*"), key=step, reverse=True)


def signal_in_step(loop: str, number: int, sent: int) -> None:
    """Send this process a signal when it is about to learn in the step, or iteration, after so many."""
    if loop != "sft":
        return rl_run.at((number, "update", 0), sent, TailRun if loop.startswith("tail") else RLRun)
    plain = SupervisedRun.train_step

    def interrupted(run, *given):
        if run.counters.step == number:
            os.kill(os.getpid(), sent)
        return plain(run, *given)

    SupervisedRun.train_step = interrupted
