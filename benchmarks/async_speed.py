"""Seconds until a task is learnt whose reward is slow now and then: synchronous against asynchronous GRPO in one run.

The embedded task (put digits in order), from a model that sorts the wrong way round two times in three. The reward says
whether an answer is right, after a while: a function that sleeps, log-normally, so that most answers are judged at once
and one of a batch keeps it waiting. Every way has the same prompts, seeds and number of iterations; ways take turns.
What counts: the seconds until the mean reward of five iterations is 90 % of the best that any way reached with that
seed, and what the model at the end answers to prompts that it never saw.

What it leaves out: the engine is where the policy is, so that writing and learning take turns, and only rewards overlap
with them. benchmarks/async_ray.py has engines of their own.

    python benchmarks/async_speed.py [--seeds 3] [--picture async_speed.png]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

from trimtab.embedded import sort_task
from trimtab.train.metrics import read_rows

PROMPTS, SAMPLES = 16, 4  # so many answers go to the reward in one call, which is best for the synchronous way
WINDOW = 5
MEDIAN, SPREAD = 0.02, 1.75  # of the seconds that a reward takes: one in a hundred takes over 1.1 s
HELD_OUT = "held out: "  # how labels begin that are judged at once: evaluation is not what is measured
WAYS = {
    "synchronous": "",
    "asynchronous, 1 batch ahead": "--async_train --async_queue_size 1",
    "asynchronous, 2 batches ahead": "--async_train --async_queue_size 2",
}
REWARD = f"""
import asyncio
import random


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if not ground_truth.startswith("{HELD_OUT}"):
        await asyncio.sleep({MEDIAN} * random.lognormvariate(0, {SPREAD}))
    return float(solution_str.strip() == ground_truth.removeprefix("{HELD_OUT}"))
"""


def run(words: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "trimtab.cli.main", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def write_task(folder: Path) -> None:
    sort_task.write(folder, descending_share=0.65)
    (folder / "reward.py").write_text(REWARD)
    rows = [json.loads(line) for line in (folder / "prompts_test.jsonl").read_text().splitlines()]
    rows = [row | {"label": HELD_OUT + row["label"]} for row in rows]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --apply_chat_template --input_key messages "
        f"--max_len 64 --max_epochs 1 --train_batch_size 64 --micro_train_batch_size 64 --learning_rate 2e-3 "
        f"--save_path {folder}/sft --ckpt_path {folder}/sft/checkpoints"
    )


def run_way(folder: Path, flags: str, seed: int, iterations: int) -> list[dict]:
    out = Path(tempfile.mkdtemp(dir=folder))
    run(
        f"grpo --pretrain {folder}/sft --prompt_data {folder}/prompts.jsonl --label_key label --apply_chat_template "
        f"--reward_func {folder}/reward.py --generate_max_len 12 --prompt_max_len 64 --n_samples_per_prompt {SAMPLES} "
        f"--rollout_batch_size {PROMPTS} --train_batch_size {PROMPTS * SAMPLES} --max_samples {PROMPTS * iterations} "
        f"--use_dynamic_batch --init_kl_coef 0 --actor_learning_rate 1e-4 --seed {seed} "
        f"--eval_dataset {folder}/held_out.jsonl --eval_temperature 1.0 --eval_n_samples_per_prompt 4 --eval_steps -1 "
        f"--save_path {out} --ckpt_path {out}/checkpoints {flags}"
    )
    rows = read_rows(out / "metrics.jsonl")[1:]
    rows[-1]["seconds"] -= rows[-1]["seconds_evaluation"]
    return rows


def curve(rows: list[dict]) -> list[tuple[float, float]]:
    """(seconds since the start, mean reward of the last iterations)"""
    seconds = accumulate(row["seconds"] for row in rows)
    rewards = [row["reward"] for row in rows]
    means = [statistics.mean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
    return list(zip(seconds, means))[WINDOW - 1 :]


def seconds_until(rows: list[dict], reward: float) -> float:
    return next((at for at, mean in curve(rows) if mean >= reward), float("nan"))


def figures(rows: list[dict], best: float) -> dict[str, float]:
    later = rows[1:]  # the first begins with nothing written
    return {
        "seconds to 90 %": seconds_until(rows, 0.9 * best),
        "seconds": sum(row["seconds"] for row in rows),
        "rollout share": sum(row["seconds_rollout"] for row in later) / sum(row["seconds"] for row in later),
        "age": statistics.mean(row.get("age", 0.0) for row in rows),
        "oldest": max(row.get("age_max", 0.0) for row in rows),
        "corrected": statistics.mean(row.get("corrected_share", 0.0) for row in rows),
        "success": rows[-1]["eval_pass_1"],
    }


def draw(found: dict[str, list[list[dict]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, panel = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for (way, runs), colour in zip(found.items(), ("#0072B2", "#D55E00", "#009E73")):
        for number, rows in enumerate(runs):
            seconds, means = zip(*curve(rows))
            panel.plot(seconds, means, color=colour, linewidth=1.4, label=way if number == 0 else None)
    panel.set_xlabel("seconds of training")
    panel.set_ylabel(f"mean reward of {WINDOW} iterations")
    panel.grid(color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="lower right")
    picture.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    found: dict[str, list[list[dict]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_task(folder)
        for seed in range(asked.seeds):
            order = list(WAYS) if seed % 2 == 0 else list(WAYS)[::-1]
            for way in order:
                found[way].append(run_way(folder, WAYS[way], seed, asked.iterations))
            best = max(mean for runs in found.values() for _, mean in curve(runs[-1]))
            for way, runs in found.items():
                told = "  ".join(f"{name} {value:.2f}" for name, value in figures(runs[-1], best).items())
                print(f"seed {seed}  {way:30s}{told}", flush=True)
    bests = [max(mean for runs in found.values() for _, mean in curve(runs[seed])) for seed in range(asked.seeds)]
    print(
        f"\n{f'mean of {asked.seeds} seeds':30s}seconds to 90 %  whole run  rollout  age (oldest)  corrected  success"
    )
    for way, runs in found.items():
        each = [figures(rows, best) for rows, best in zip(runs, bests)]
        mean = {name: statistics.mean(f[name] for f in each) for name in each[0]}
        oldest = max(f["oldest"] for f in each)
        print(
            f"{way:30s}{mean['seconds to 90 %']:15.1f}{mean['seconds']:11.1f}{mean['rollout share']:9.0%}"
            f"{mean['age']:7.2f} ({oldest:.0f}){mean['corrected']:14.1%}{mean['success']:9.1%}"
        )
    if asked.picture:
        draw(found, asked.picture)


if __name__ == "__main__":
    main()
