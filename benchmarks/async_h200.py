"""GRPO with answers of very uneven lengths on one accelerator: synchronous against asynchronous, in one run.

A chat model is asked for a story of about N words, N from 10 to 600, and rewarded for coming near. Without
--async_train an iteration lasts as long as its longest answer, and towards its end the engine writes a few answers
where it could write hundreds. With it the next batch is trained as soon as it is there, and long answers go on
afterwards. Every way has the same prompts, seeds and number of iterations, and 256 places in the engine, which are
enough for one batch; one way has enough for two.

What it leaves out: quality. The reward shows that both learn the same thing at the same pace an iteration.

    python benchmarks/async_h200.py MODEL [ITERATIONS] [FOLDER]
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from trimtab.distributed.device import find_device
from trimtab.train.metrics import read_rows

LARGE = find_device().is_accelerator  # else a rehearsal
PROMPTS, SAMPLES, LONGEST = (32, 8, 1024) if LARGE else (2, 2, 24)
WORDS = (10, 20, 40, 80, 160, 300, 600) if LARGE else (2, 10)
THINGS = ("a lighthouse", "an old dog", "the first snow", "a lost letter", "two brothers", "a storm", "a small shop")
PLACES = ("in Norway", "by the sea", "in a big city", "on a farm", "in the mountains", "on a train", "long ago")
WAYS = {
    "synchronous": "",
    "asynchronous, 1 batch ahead": "--async_train",
    "asynchronous, 1 batch ahead, 512 places": "--async_train --rollout_slots 512",
    "asynchronous, 2 batches ahead": "--async_train --async_queue_size 2",
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    wanted, found = int(ground_truth), len(solution_str.split())
    return max(0.0, 1.0 - abs(found - wanted) / wanted)
"""


def write_task(folder: Path, prompts: int) -> None:
    draw = random.Random(0)
    rows = []
    for _ in range(prompts):
        words = draw.choice(WORDS)
        text = f"Write a story of about {words} words about {draw.choice(THINGS)} {draw.choice(PLACES)}."
        rows.append({"input": [{"role": "user", "content": text}], "label": str(words)})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def run_way(model: str, folder: Path, way: str) -> list[dict]:
    out = folder / way.replace(", ", "_").replace(" ", "_")
    words = (
        f"grpo --pretrain {model} --prompt_data {folder}/prompts.jsonl --label_key label --apply_chat_template "
        f"--reward_func {folder}/reward.py --prompt_max_len 128 --generate_max_len {LONGEST} "
        f"--rollout_batch_size {PROMPTS} --n_samples_per_prompt {SAMPLES} --train_batch_size {PROMPTS * SAMPLES} "
        f"--use_dynamic_batch --init_kl_coef 0 --actor_learning_rate 5e-6 --lr_warmup_ratio 0 {'--bf16' * LARGE} "
        f"--disable_ds_ckpt --save_path {out} --ckpt_path {out}/checkpoints {WAYS[way]}"
    )
    done = subprocess.run([sys.executable, "-m", "trimtab.cli.main", *words.split()], capture_output=True, text=True)
    if done.returncode:
        sys.exit((done.stdout + done.stderr)[-4000:])
    return read_rows(out / "metrics.jsonl")


def figures(rows: list[dict]) -> dict[str, float]:
    later = rows[3:]  # the first ones are the device's warming up, and begin with nothing written
    seconds = sum(row["seconds"] for row in later)
    return {
        "seconds an iteration": seconds / len(later),
        "tokens a second": sum(row["tokens"] for row in later) / seconds,
        "rollout": sum(row["seconds_rollout"] for row in later) / len(later),
        "update": sum(row["seconds_update"] for row in later) / len(later),
        "length": statistics.mean(row["length"] for row in later),
        "longest": max(row["length_max"] for row in later),
        "age": statistics.mean(row.get("age", 0.0) for row in later),
        "oldest": max(row.get("age_max", 0.0) for row in later),
        "read again, of the trained": sum(row.get("read_again", 0) for row in later) / sum(r["tokens"] for r in later),
        "corrected": statistics.mean(row.get("corrected_share", 0.0) for row in later),
    }


def main() -> None:
    iterations = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    with tempfile.TemporaryDirectory() as place:
        folder = Path(sys.argv[3] if len(sys.argv) > 3 else place)
        folder.mkdir(parents=True, exist_ok=True)
        write_task(folder, PROMPTS * iterations)
        found = {}
        for way in WAYS:
            found[way] = run_way(sys.argv[1], folder, way)
            print(way, json.dumps({name: round(value, 3) for name, value in figures(found[way]).items()}), flush=True)
    print(f"\n{'mean reward of iterations':42s}" + "".join(f"{first + 1:>8d}-" for first in range(0, iterations, 5)))
    for way, rows in found.items():
        means = [statistics.mean(row["reward"] for row in rows[first : first + 5]) for first in range(0, len(rows), 5)]
        print(f"{way:42s}" + "".join(f"{mean:9.3f}" for mean in means))
    base = figures(found["synchronous"])["tokens a second"]
    for way, rows in found.items():
        speed = figures(rows)["tokens a second"]
        print(f"{way:42s}{speed:10,.0f} tokens a second, {speed / base:.2f} times the synchronous")


if __name__ == "__main__":
    main()
