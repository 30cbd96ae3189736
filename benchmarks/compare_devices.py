"""How far two devices, or two precisions, train apart: every kind of job on each, and what `trimtab compare` says.

Model: the sort task's Llama of 0.86 million parameters, for SFT with random weights, for the other jobs after some SFT.
RL learns on all sides from the answers of the first one (--record, --replay), or with --own_answers each from its own.
Sides are CPU fp32 and bf16 and, where there is an accelerator, the same on it; the first is what others are compared
with. Then come the controls, pairs that must not pass: another order, other initial weights, a learning rate 10 %
higher. Prints one line a pair, with what the figures alone would say of it.

    python benchmarks/compare_devices.py --folder /tmp/sides
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ON_THE_CPU = {name: "" for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")}


@dataclasses.dataclass(frozen=True)
class Side:
    name: str
    words: str = ""
    environment: dict = dataclasses.field(default_factory=dict)
    task: str = "task"
    rate: float = 1.0


FIRST = Side("CPU fp32", environment=ON_THE_CPU)
OTHERS = (
    Side("CPU bf16", "--bf16", ON_THE_CPU),
    Side("accelerator fp32"),
    Side("accelerator bf16", "--bf16"),
)
CONTROLS = (
    Side("another order", "--seed 1", ON_THE_CPU),
    Side("another initial model", "", ON_THE_CPU, task="another_task"),
    Side("learning rate 10 % higher", "", ON_THE_CPU, rate=1.1),
)

RL = (
    "--prompt_data {task}/prompts.jsonl --label_key label --apply_chat_template --reward_verifier exact "
    "--rollout_batch_size 16 --n_samples_per_prompt 8 --train_batch_size 64 --micro_train_batch_size 64 "
    "--prompt_max_len 64 --generate_max_len 12 --packing_samples --max_steps {steps} --lr_warmup_ratio 0.1"
)
FIXED = "--max_len 64 --train_batch_size 32 --micro_train_batch_size 32 --max_steps {steps}"
# Job, what it starts from, its learning rate, its words.
JOBS = {
    "SFT": ("sft", "model", 2e-3, f"--dataset {{task}}/train.jsonl --max_epochs 1 {FIXED}"),
    "RM": ("rm", "start", 1e-4, f"--dataset {{task}}/pairs.jsonl {FIXED}"),
    "DPO": ("dpo", "start", 1e-4, f"--dataset {{task}}/pairs.jsonl --beta 0.1 {FIXED}"),
    "KTO": ("kto", "start", 1e-4, f"--dataset {{task}}/unpaired.jsonl --beta 0.5 {FIXED}"),
    "PRM": ("prm", "start", 1e-4, f"--dataset {{task}}/steps.jsonl --placeholder_token . --reward_tokens y n {FIXED}"),
    "PPO": ("ppo", "start", 5e-6, f"--critic_learning_rate 3e-5 --init_kl_coef 0.05 {RL}"),
    "GRPO": ("grpo", "start", 5e-6, f"--init_kl_coef 0.05 {RL}"),
    "REINFORCE++": ("reinforce", "start", 5e-6, f"--init_kl_coef 0.05 {RL}"),
}


def words_of(job: str, side: Side, folder: Path, steps: int, own_answers: bool) -> list[str]:
    verb, start, rate, words = JOBS[job]
    is_rl = "--prompt_data" in words
    name = "actor_learning_rate" if is_rl else "learning_rate"
    words = f"{verb} --pretrain {folder / side.task / start} --{name} {rate * side.rate:g} {words} {side.words}"
    if is_rl:
        steps = steps * 3 // 4
        if not own_answers:
            words += f" --{'record' if side == FIRST else 'replay'} {folder / 'recordings' / verb}"
    return f"{words} --save_path {run_of(job, side, folder)}".format(task=folder / "task", steps=steps).split()


def run_of(job: str, side: Side, folder: Path) -> Path:
    return folder / side.name.replace(" ", "_").replace("%", "percent") / JOBS[job][0]


def called(words: list[str], codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints."""
    from trimtab.cli.main import main as trimtab

    told, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(complaint):
        code = trimtab(words)
    if code not in codes:
        sys.exit(f"{' '.join(words)}\n{told.getvalue()}{complaint.getvalue()}")
    return told.getvalue()


def make_task(folder: Path, seed: int) -> None:
    """Models and data; the other jobs start from a model after 200 steps of SFT, which sorts some numbers right."""
    from trimtab.embedded import sort_task

    sort_task.write(folder, seed, train_rows=12_800, judged_rows=4_096, descending_share=0.5)
    words = (
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --max_len 64 --max_epochs 1 "
        f"--learning_rate 2e-3 --train_batch_size 64 --micro_train_batch_size 64 --save_path {folder}/start"
    )
    called(words.split())


def run_side(side: Side, folder: Path, jobs: list[str], steps: int, own_answers: bool) -> None:
    """In a process of its own, whose environment says which devices there are."""
    for seed, task in enumerate(("task", "another_task")):
        if task == side.task and not (folder / task / "start" / "config.json").is_file():
            make_task(folder / task, seed)
    for job in jobs:
        called(words_of(job, side, folder, steps, own_answers))
        print(f"{side.name}: {job} is done", flush=True)


def compare(job: str, side: Side, folder: Path) -> str:
    """A line of the table."""
    words = ["compare", str(run_of(job, FIRST, folder)), str(run_of(job, side, folder)), "--json"]
    found = json.loads(called(words, codes=(0, 1)))
    errors = ", ".join(
        f"{name} {100 * figure['weighted']:.2f} % (first {100 * figure['first']:.3f} %)"
        for name, figure in found["figures"].items()
    )
    told = "; ".join(found["complaints"]).replace("\u00a0", " ")
    # What would be said if the manifests said nothing: the last of the complaints are those of the figures.
    figures = "fail" if found["complaints"][len(found["disagreements"]) :] else "pass"
    verdict = f"{'passes' if found['passes'] else 'fails ':8s}figures alone {figures}  "
    return f"{side.name:26s}{job:12s}{verdict}{errors}{' | ' * bool(told)}{told}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40, help="of RL three quarters of them")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--own_answers", action="store_true", help="RL draws its answers on every side")
    parser.add_argument("--at_once", type=int, default=1, help="how many sides after the first run at a time")
    parser.add_argument("--side", type=int, help="train this side alone; used from within")
    options = parser.parse_args()
    sides = (FIRST, *OTHERS, *CONTROLS)
    if options.side is not None:
        run_side(sides[options.side], options.folder, options.jobs, options.steps, options.own_answers)
        return
    import torch

    words = ["--folder", str(options.folder), "--steps", str(options.steps), "--jobs", *options.jobs]
    words += ["--own_answers"] if options.own_answers else []

    def start(side: Side) -> None:
        command = [sys.executable, __file__, *words, "--side", str(sides.index(side))]
        subprocess.run(command, check=True, env={**os.environ, **side.environment})

    start(FIRST)
    here = [side for side in sides[1:] if side.environment or torch.accelerator.is_available()]
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(start, here))
    for side in here:
        for job in options.jobs:
            print(compare(job, side, options.folder), flush=True)


if __name__ == "__main__":
    main()
