"""Does GRPO learn otherwise with --exact? Reward, entropy and KL of a small model on sums, with it and without.

The model first learns from the solutions of examples/claims/skill.py, then samples 32 prompts x 8 answers an iteration,
learning rate 1e-5, with a KL weight so small that the KL is measured and changes nothing. Runs share the device.

    python examples/claims/skill.py data --folder skill --tasks short_sums
    python benchmarks/h200/exact_learning.py --model MODEL --data skill/data/short_sums --folder runs --figure a.png
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples" / "claims"))
import skill_job
import skill_tasks

PANELS = {"reward": "right answers", "sampled_entropy": "entropy of a token", "kl": "KL to the start"}
PANELS |= {"log_prob_gap": "log_prob_gap"}
SMOOTHED = 5  # iterations, in the picture
PROMPTS, ANSWERS = 32, 8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model to start from")
    parser.add_argument("--data", required=True, type=Path, help="folder with sft.jsonl and train.jsonl")
    parser.add_argument("--folder", required=True, type=Path, help="where models, rows and the figure's data are")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--task", default="short_sums")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--modes", default="on,off", help="of --exact, by commas")
    parser.add_argument("--fp32", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--one", help="MODE-SEED: this run alone, in this process")
    options = parser.parse_args(argv)
    if options.one:
        return train(options, *options.one.split("-"))
    options.folder.mkdir(parents=True, exist_ok=True)
    start = options.folder / "sft"
    if not start.exists():
        job = argparse.Namespace(**vars(options), save_path=start, seed=1, bf16=not options.fp32, sft_rows=512)
        skill_job.sft(argparse.Namespace(**vars(job), prompts=PROMPTS, learning_rate=5e-5))
    names = [f"{mode}-{seed}" for mode in options.modes.split(",") for seed in options.seeds.split(",")]
    words = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
    running = {name: subprocess.Popen([*words, "--one", name]) for name in names}
    failed = [name for name, process in running.items() if process.wait()]
    found = {name: read(options.folder / f"{name}.jsonl") for name in names if name not in failed}
    tell(found)
    if options.figure and found:
        draw(found, options.figure)
    sys.exit(f"failed: {failed}" if failed else 0)


def train(options: argparse.Namespace, mode: str, seed: str) -> None:
    import trimtab

    rows = (options.folder / f"{mode}-{seed}.jsonl").open("w")
    trimtab.grpo(
        str(options.folder / "sft"), str(options.data / "train.jsonl"), skill_job.right,
        save_path=str(options.folder / f"model-{mode}-{seed}"), seed=int(seed), exact=mode, bf16=not options.fp32,
        compile="off", overwrite=True, input_key="prompt", label_key="label", apply_chat_template=True,
        max_samples=options.iterations * PROMPTS, rollout_batch_size=PROMPTS, n_samples_per_prompt=ANSWERS,
        train_batch_size=PROMPTS * ANSWERS // 2, prompt_max_len=320, rollout_slots=PROMPTS * ANSWERS,
        generate_max_len=skill_tasks.TASKS[options.task].longest, use_dynamic_batch=True,
        train_max_tokens_per_gpu=8192, init_kl_coef=1e-9, actor_learning_rate=1e-5,
        lr_scheduler="constant_with_warmup", save_steps=-1,
        on_iteration=lambda row: print(json.dumps({name: row.get(name) for name in PANELS}), file=rows, flush=True),
    )  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last(rows: list[dict[str, Any]], name: str) -> float:
    """Of the last sixth of the iterations."""
    return fmean(row[name] for row in rows[-max(1, len(rows) // 6) :])


def tell(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in found.items():
        ends = {panel: float(f"{last(rows, panel):.4g}") for panel in PANELS}
        largest = max(row["log_prob_gap"] for row in rows)
        told = {"work": f"learning, exact {name}", "iterations": len(rows), **ends, "largest_gap": largest}
        print("ROW", json.dumps(told))


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"on": "tab:blue", "off": "tab:orange"}
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(3.4 * len(PANELS), 2.9), layout="constrained")
    for axis, (panel, title) in zip(axes, PANELS.items()):
        for number, (name, rows) in enumerate(found.items()):
            mode = name.split("-")[0]
            new = mode not in [other.split("-")[0] for other in list(found)[:number]]
            values = [row[panel] for row in rows]
            smooth = [fmean(values[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(values))]
            axis.plot(smooth, color=colours[mode], linewidth=1.1, label=f"--exact {mode}" if new else None)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("iteration", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
