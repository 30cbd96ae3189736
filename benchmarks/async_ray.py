"""How long the trainer waits on Ray with engines of their own: GRPO as it always was against --async_train, in one run.

One vLLM engine and one process that trains, on this machine's CPU, under a Ray of their own. The reward is a function
that answers after a while: log-normal, so that now and then one answer keeps its whole batch waiting. Every way has the
same prompts, seeds and number of iterations, one way after the other, and in every second round the other way round.
Waiting is the trainer's time for the next batch and its time for new weights to arrive, in which engines that drain end
their answers, as a share of all its time between the first and the last iteration; both are shown.

What it leaves out: the model is small and random, so the reward says that learning works, not how well. Engine and
trainer share this machine's cores, which two devices would not.

    python benchmarks/async_ray.py [ITERATIONS] [ROUNDS]
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

PROMPTS, SAMPLES, NEW_TOKENS = 8, 4, 48
MEDIAN, SPREAD = 0.05, 1.5  # of the seconds that a reward takes: one in a hundred takes over 1.6 s
WAYS = {
    "synchronous": "",
    "asynchronous, drained": "--async_train",
    "asynchronous, in flight": "--async_train --partial_rollout",
}
REWARD = f"""
import asyncio
import random


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep({MEDIAN} * random.lognormvariate(0, {SPREAD}))
    return sum(character in "02468" for character in solution_str) / max(1, len(solution_str))
"""


def write_task(folder: Path, iterations: int) -> None:
    import json

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trimtab.embedded.sort_task import make_prompts, make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    rows = make_prompts(iterations * PROMPTS, 1)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def run_way(folder: Path, flags: str) -> dict[str, float]:
    from trimtab.train.metrics import read_rows

    out = Path(tempfile.mkdtemp(dir=folder))
    words = (
        f"grpo --ray --vllm_num_engines 1 --pretrain {folder} --prompt_data {folder}/prompts.jsonl --label_key label "
        f"--apply_chat_template --reward_func {folder}/reward.py --prompt_max_len 32 --generate_max_len {NEW_TOKENS} "
        f"--rollout_batch_size {PROMPTS} --n_samples_per_prompt {SAMPLES} --train_batch_size {PROMPTS * SAMPLES} "
        f"--actor_learning_rate 1e-3 --lr_warmup_ratio 0 --init_kl_coef 0 --max_epochs 2 --rollout_slots 64 "
        f"--save_path {out} --ckpt_path {out}/checkpoints {flags}"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # one of vLLM's functions compiles for a minute
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.cli.main", *words.split()], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    whole = time.monotonic() - began
    rows = read_rows(out / "metrics.jsonl")
    rows = [row for row in rows if row["step"] > 1]  # the first one begins with nothing written
    total = sum(row["seconds"] for row in rows)
    last = rows[-len(rows) // 4 :]
    batch, sync = (sum(row[f"seconds_{phase}"] for row in rows) / total for phase in ("rollout", "sync"))
    return {
        "seconds": total,
        "waiting": batch + sync,
        "for a batch": batch,
        "for weights": sync,
        "age": statistics.mean(row.get("age", 0.0) for row in rows),
        "age_max": max(row.get("age_max", 0.0) for row in rows),
        "engine_busy": statistics.mean(row.get("engine_busy", float("nan")) for row in rows),
        "reward": statistics.mean(row["reward"] for row in last),
        "start and end": whole - total,
    }


def main() -> None:
    if find_spec("vllm") is None:
        return print("vLLM is not installed: nothing is measured")
    iterations, rounds = (int(word) for word in (sys.argv[1:] + ["24", "2"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_task(folder, iterations)
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                found = run_way(folder, WAYS[way])
                taken[way].append(found)
                print(f"{way:24s}" + "  ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
        told = f"iterations: {iterations}, rounds: {rounds}"
        print(f"\n{told:28s}waiting  for a batch  for weights  seconds  of the synchronous time   age  reward")
        means = {way: {name: statistics.mean(r[name] for r in runs) for name in runs[0]} for way, runs in taken.items()}
        for way, mean in means.items():
            share = mean["seconds"] / means["synchronous"]["seconds"]
            print(
                f"{way:28s}{mean['waiting']:7.0%}{mean['for a batch']:13.0%}{mean['for weights']:13.0%}"
                f"{mean['seconds']:9.1f}{share:25.2f}{mean['age']:6.2f}{mean['reward']:8.3f}"
            )


if __name__ == "__main__":
    main()
