"""Reward hacking, seen and held: PPO against a learnt judge, watched by another that it is not paid by.

A proxy judge learns from a few preference pairs and pays PPO. A gold judge, from other pairs and more of them, only
looks on. As the policy moves away from where it began (its KL), the proxy's score rises; gold's rises less, or falls
again. A KL penalty holds the policy where the two still agree. Beside it stands the best of n answers by the proxy,
whose KL is known: log n - (n - 1) / n.

    python overoptimisation.py run   --model M --pairs FILE --folder runs
    python overoptimisation.py table --folder runs
    python overoptimisation.py draw  --folder runs --figure overoptimisation.png

FILE has rows with `chosen` and `rejected`: conversations as lists of messages, or texts such as "Human: ... Assistant:
..." with an empty line before each speaker. They are shuffled and split by their prompts: to hold out, for the proxy,
for gold. PPO trains on the prompts of proxy and gold, and is watched on those held out. The proxy is of two kinds
(`--labels`): `pairs` learns from its share of the pairs; `gold` learns from pairs of the policy's own answers, which
the gold judge has put in order, so that gold is the truth by definition and all that differs is the proxy's error.

Nothing is tuned: no weight, rate or length was chosen by what gold says. Left out: ensembles of judges, and other ways
to hold the policy than the KL.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grid
import overoptimisation_report as report
from judge import read_pairs

HERE = Path(__file__).parent
SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
SPLIT_SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "draw"])
    parser.add_argument("--model", help="the policy, a folder")
    parser.add_argument("--pairs", type=Path, help="preference pairs, JSONL, may be gzipped")
    parser.add_argument("--folder", type=Path, required=True, help="where splits, models and results.jsonl are")
    parser.add_argument("--labels", default="pairs,gold", help="what proxies learn from")
    parser.add_argument("--proxy_pairs", type=int, default=250)
    parser.add_argument("--heldout_pairs", type=int, default=250)
    parser.add_argument("--kl", default="0,0.05", help="weights of the KL")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=2e-5, help="of PPO")
    parser.add_argument("--judge_learning_rate", type=float, default=3e-5)
    parser.add_argument("--prompts", type=int, default=16, help="of an iteration")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--longest", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--max_len", type=int, default=512, help="tokens of a prompt, and of a pair")
    parser.add_argument("--curve", type=int, default=10, help="held-out prompts are answered every so many iterations")
    parser.add_argument("--most", type=int, default=128, help="answers of which the best are taken")
    parser.add_argument("--eval_prompts", type=int, default=128)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--at_once", type=int, default=4, help="jobs that share the device")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of this sitting")
    parser.add_argument("--iteration_seconds", type=float, default=2.0, help="about, with so many at once")
    parser.add_argument("--figure", type=Path, default=Path("overoptimisation.png"))
    options = parser.parse_args(argv)
    results = options.folder / "results.jsonl"
    if options.what == "draw":
        report.draw(grid.read(results), options.figure)
        return 0
    left: list[str] = []
    if options.what == "run":
        if not options.model or not options.pairs:
            parser.error("--model and --pairs: what to start from, and what to learn from")
        split(options)
        left = grid.run(jobs(options), options.folder, at_once=options.at_once, limit=options.limit)
    print(report.table(grid.read(results)))
    return 1 if left else 0


def jobs(options: argparse.Namespace) -> list[grid.Job]:
    labels = options.labels.split(",")
    found = [job(options, "gold", "judge", 25, pairs="gold")]
    if "pairs" in labels:
        found.append(job(options, "proxy_pairs", "judge", 25, pairs="proxy"))
    if "gold" in labels:
        found.append(job(options, "proxy_gold", "labelled_judge", 35, ("gold",), pairs="proxy", gold="gold"))
    seconds = 30 + options.iterations * options.iteration_seconds
    weights = [float(word) for word in options.kl.split(",")]
    for place, seed in enumerate(options.seeds.split(",")):
        for label in labels:
            judges = {"gold": "gold", "proxy": f"proxy_{label}"}
            needs = tuple(judges.values())
            for weight in weights:
                name = f"ppo-{label}-{weight:.6f}".rstrip("0").rstrip(".") + f"-{seed}"
                found.append(job(options, name, "ppo", seconds, needs, kl=weight, seed=seed, **judges))
            if place == 0:
                found.append(job(options, f"best-{label}", "best_of", 40, needs, **judges))
    return found


def job(
    options: argparse.Namespace, name: str, kind: str, seconds: float, needs: tuple[str, ...] = (), **more: Any
) -> grid.Job:
    models = options.folder / "models"
    judges = {key: models / more.pop(key) for key in ("gold", "proxy") if key in more}
    shared = ("model", "iterations", "prompts", "answers", "longest", "max_len", "curve", "most", "eval_prompts")
    told = {key: getattr(options, key) for key in shared} | judges | more
    told |= {"data": options.folder / "data", "save_path": models / name}
    told["learning_rate"] = options.learning_rate if kind == "ppo" else options.judge_learning_rate
    words = [word for key, value in told.items() for word in (f"--{key}", str(value))]
    words.append("--bf16" if options.bf16 else "--no-bf16")
    product = models / name if "judge" in kind else None
    return grid.Job(
        name, [sys.executable, str(HERE / "overoptimisation_job.py"), kind, *words], needs, seconds, product
    )


def split(options: argparse.Namespace) -> None:
    """Pairs of one prompt stay together."""
    folder = options.folder / "data"
    if folder.exists():
        return
    together: dict[str, list[dict]] = {}
    left_out = 0
    for place, row in enumerate(read_pairs(options.pairs), start=1):
        if (pair := as_pair(row, f"{options.pairs} row {place}")) is None:
            left_out += 1
        else:
            together.setdefault(json.dumps(pair["prompt"]), []).append(pair)
    if left_out:
        print(f"{options.pairs}: {left_out} rows left out, whose two sides are not one prompt with two answers")
    prompts = list(together)
    random.Random(SPLIT_SEED).shuffle(prompts)
    splits: dict[str, list[dict]] = {"heldout": [], "proxy": [], "gold": []}
    wanted = {"heldout": options.heldout_pairs, "proxy": options.proxy_pairs, "gold": sys.maxsize}
    for prompt in prompts:
        name = next(name for name in splits if len(splits[name]) < wanted[name])
        splits[name] += together[prompt]
    if not splits["gold"]:
        raise SystemExit(f"{options.pairs}: no pairs are left for gold; lower --heldout_pairs and --proxy_pairs")
    splits["train"] = splits["proxy"] + splits["gold"]
    folder.mkdir(parents=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_pair(row: dict[str, Any], where: str) -> dict[str, Any] | None:
    """The messages that both sides begin with, and the two answers; None if it is not so."""
    sides = [_messages(row.get(name), f"{where}, {name}") for name in ("chosen", "rejected")]
    if isinstance(row.get("prompt"), list):
        sides = [side if len(side) > 1 else [*row["prompt"], *side] for side in sides]
    (*prompt, chosen), (*other, rejected) = sides
    if prompt != other or chosen["role"] != "assistant" or rejected["role"] != "assistant":
        return None
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if isinstance(value, list):
        return value
    parts = SPEAKER.split(value) if isinstance(value, str) else []
    if len(parts) < 5 or parts[0].strip():
        raise SystemExit(f"{where}: neither messages nor a text with 'Human:' and 'Assistant:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[1::2], parts[2::2])]


if __name__ == "__main__":
    sys.exit(main())
