"""Does RL with verifiable rewards teach a skill, or a format?

A short SFT on solutions gives a model the form and some of the skill; then GRPO, DAPO, RLOO, REINFORCE++ and PPO go on
from it with the same prompts and as many answers, paid for right answers alone.

    python skill.py data  --folder runs                  prompts alone, for a machine without reasoning-gym
    python skill.py try   --model M --folder runs        what the model can do of every task, as it came and after SFT
    python skill.py run   --model M --folder runs --tasks sums,knights      the grid: choose learning rates, then run
    python skill.py table --folder runs                  figures of all that was run, as Markdown
    python skill.py draw  --folder runs --figure skill.png

Prompts of SFT, RL, validation and test are all different. Tasks, the length of the SFT and the learning rate of each
method (`--learning_rates`, with a seed of its own and fewer iterations) are chosen on the validation prompts; the test
prompts are answered by the runs that are shown, and by nothing else. A grid that was stopped goes on with the same
command; `--limit` seconds bound a sitting. A larger model or fuller grid is a matter of options.

Left out: hyperparameters other than the learning rate, which are the same for all methods.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grid
import skill_report
import skill_tasks
from skill_job import PRESETS

HERE = Path(__file__).parent
SPLITS = ("test", "validation", "sft", "train")  # in this order each leaves out what those before it ask
CHOOSING = 0  # the seed of the runs that choose a learning rate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "try", "run", "table", "draw"])
    parser.add_argument("--model", help="what to start from, a folder")
    parser.add_argument("--folder", type=Path, required=True, help="where data, models and results.jsonl are")
    parser.add_argument("--tasks", type=_names(skill_tasks.TASKS), help="of skill_tasks.py; try: all of reasoning-gym")
    parser.add_argument("--methods", type=_names(PRESETS), default=list(PRESETS))
    parser.add_argument("--seeds", type=_numbers(int), default=[1, 2])
    parser.add_argument("--learning_rates", type=_numbers(float), default=[1e-5, 3e-5], help="one: nothing to choose")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--choosing_iterations", type=int, default=25)
    parser.add_argument("--curve", type=int, default=25, help="look at test prompts every so many iterations; 0: never")
    parser.add_argument("--prompts", type=int, default=32, help="of an iteration")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--sft_rows", type=int, default=512)
    parser.add_argument("--sft_learning_rates", type=_numbers(float), default=[2e-5], help="run: the first")
    parser.add_argument("--eval_rows", type=int, default=256)
    parser.add_argument("--eval_answers", type=int, default=16)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--at_once", type=int, default=4, help="jobs that share the device")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of this sitting")
    parser.add_argument("--iteration_seconds", type=float, default=2.5, help="about, with so many at once")
    parser.add_argument("--figure", type=Path, default=Path("skill.png"))
    options = parser.parse_args(argv)
    results = options.folder / "results.jsonl"
    if options.what == "table":
        print(skill_report.table(grid.read(results)))
        return 0
    if options.what == "draw":
        skill_report.draw(grid.read(results), options.figure)
        return 0
    if options.what in ("data", "try"):
        options.tasks = options.tasks or [name for name, task in skill_tasks.TASKS.items() if task.name]
    if options.what == "data":
        for task in options.tasks:
            make_data(options, task, options.folder / "data" / task)
        return 0
    if not options.model:
        parser.error("--model: what to start from")
    if options.what == "try":
        grid.run(tried(options), options.folder, at_once=options.at_once, limit=options.limit)
        print(skill_report.trials(grid.read(results)))
        return 0
    options.tasks = options.tasks or ["sums"]
    return run(options)


def run(options: argparse.Namespace) -> int:
    """First what chooses a learning rate, then what is shown; the second part takes what time the first has left."""
    end = time.monotonic() + options.limit
    if len(options.learning_rates) > 1:
        grid.run(choosing(options), options.folder, at_once=options.at_once, limit=end - time.monotonic())
    chosen = best_rates(options, grid.read(options.folder / "results.jsonl"))
    for (task, method), rate in chosen.items():
        print(f"{task}: {method} learns with {rate:g}")
    left = grid.run(shown(options, chosen), options.folder, at_once=options.at_once, limit=end - time.monotonic())
    print(skill_report.table(grid.read(options.folder / "results.jsonl")))
    return 1 if left or len(chosen) < len(options.tasks) * len(options.methods) else 0


def tried(options: argparse.Namespace) -> list[grid.Job]:
    jobs = []
    for task in options.tasks:
        jobs.append(job(options, task, f"try-{task}-base", "base", seconds=20))
        for rate in options.sft_learning_rates:
            jobs.append(job(options, task, f"try-{task}-sft-{rate:g}", "sft", seconds=20, learning_rate=rate))
    return jobs


def choosing(options: argparse.Namespace) -> list[grid.Job]:
    """SFTs, and a short run of every method with every learning rate, judged on the validation prompts."""
    seconds = 25 + options.choosing_iterations * options.iteration_seconds
    jobs = [job(options, task, f"{task}-sft", "sft", seconds=20, split="test") for task in options.tasks]
    for task in options.tasks:
        for method in options.methods:
            for rate in options.learning_rates:
                short = {"iterations": options.choosing_iterations, "learning_rate": rate, "seed": CHOOSING}
                short |= {"eval_answers": min(8, options.eval_answers)}
                jobs.append(job(options, task, f"choose-{task}-{method}-{rate:g}", method, seconds=seconds, **short))
    return jobs


def best_rates(options: argparse.Namespace, rows: list[dict]) -> dict[tuple[str, str], float]:
    """For each task and method the learning rate after which most validation answers were right, once all of them were
    tried: in another sitting it must not become another one."""
    if len(options.learning_rates) == 1:
        return {(task, method): options.learning_rates[0] for task in options.tasks for method in options.methods}
    rates = {}
    for task in options.tasks:
        for method in options.methods:
            found = {
                rate: row["pass_1"][0]
                for row in rows
                for rate in options.learning_rates
                if row["job"] == f"choose-{task}-{method}-{rate:g}" and row.get("final")
            }
            if len(found) == len(options.learning_rates):
                rates[task, method] = max(found, key=found.__getitem__)
    return rates


def shown(options: argparse.Namespace, rates: dict[tuple[str, str], float]) -> list[grid.Job]:
    """The model as it came, the SFT, and every method that has its learning rate with every seed. A task is whole
    before the next begins."""
    jobs = []
    for task in options.tasks:
        jobs.append(job(options, task, f"{task}-sft", "sft", seconds=20, split="test"))
        jobs.append(job(options, task, f"{task}-base", "base", seconds=20, split="test"))
    seconds = 30 + options.iterations * options.iteration_seconds
    for task in options.tasks:
        for seed in options.seeds:
            for method in (method for method in options.methods if (task, method) in rates):
                long = {"iterations": options.iterations, "learning_rate": rates[task, method], "seed": seed}
                name = f"{task}-{method}-{seed}"
                jobs.append(job(options, task, name, method, seconds, split="test", curve=options.curve, **long))
    return jobs


def job(options: argparse.Namespace, task: str, name: str, kind: str, seconds: float, **more: object) -> grid.Job:
    data, models = options.folder / "data" / task, options.folder / "models"
    make_data(options, task, data)
    told = {"task": task, "data": data, "prompts": options.prompts, "answers": options.answers}
    told |= {"sft_rows": options.sft_rows, "eval_rows": options.eval_rows, "eval_answers": options.eval_answers}
    needs: tuple[str, ...] = ()
    product = None
    if kind in ("base", "sft"):
        told |= {"model": options.model, "reference": options.model}
    else:
        told |= {"model": models / f"{task}-sft", "save_path": models / name}
        needs = (f"{task}-sft",)
    if kind == "sft":
        product = models / name
        told |= {"save_path": product, "learning_rate": options.sft_learning_rates[0]}
    words = [word for key, value in (told | more).items() for word in (f"--{key}", str(value))]
    words.append("--bf16" if options.bf16 else "--no-bf16")
    return grid.Job(name, [sys.executable, str(HERE / "skill_job.py"), kind, *words], needs, seconds, product)


def make_data(options: argparse.Namespace, task: str, folder: Path) -> None:
    """The splits, once: each of other questions than the others."""
    most = max(options.iterations, options.choosing_iterations) * options.prompts
    counts = {"test": options.eval_rows, "validation": options.eval_rows, "sft": options.sft_rows, "train": most}
    if all(len(grid.read(folder / f"{split}.jsonl")) >= count for split, count in counts.items()):
        return
    asked: set[str] = set()
    folder.mkdir(parents=True, exist_ok=True)
    for seed, split in enumerate(SPLITS):
        rows = skill_tasks.rows(task, counts[split], seed, without=asked)
        asked |= {row["prompt"] for row in rows}
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _names(known):
    def read(words: str) -> list[str]:
        found = words.split(",")
        for word in found:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(known)}")
        return found

    return read


def _numbers(kind):
    def read(words: str) -> list:
        return [kind(word) for word in words.split(",")]

    return read


if __name__ == "__main__":
    sys.exit(main())
