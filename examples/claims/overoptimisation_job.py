"""One job of overoptimisation.py's grid, in a process of its own: a judge, the best of n answers, or a run of PPO."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import estimates
import grid

FIGURES = ("reward", "kl_answer", "kl", "length", "truncated", "sampled_entropy", "explained_variance", "clip_fraction")
FIGURES += ("memory_gib", "seconds_rollout", "seconds_scoring", "seconds_update", "seconds_evaluation")

PAIRS_OF_A_STEP = 32
JUDGED_AT_ONCE = 256  # answers in a pass of a judge, where their tokens fit


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["judge", "labelled_judge", "best_of", "ppo"])
    parser.add_argument("--model", required=True, help="the policy before RL, of which the judges are made, too")
    parser.add_argument("--data", required=True, type=Path, help="folder of the splits")
    parser.add_argument("--pairs", help="split that a judge learns from")
    parser.add_argument("--gold", help="folder of the gold judge")
    parser.add_argument("--proxy", help="folder of the judge that PPO is paid by")
    parser.add_argument("--save_path", type=Path)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--critic_learning_rate", type=float, default=3e-5)
    parser.add_argument("--epochs", type=int, default=2, help="of a judge")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16, help="of an iteration")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--longest", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--max_len", type=int, default=512, help="tokens of a prompt, and of a judge's pair")
    parser.add_argument("--curve", type=int, default=10, help="held-out prompts are answered every so many iterations")
    parser.add_argument("--most", type=int, default=128, help="answers of which the best are taken")
    parser.add_argument("--eval_prompts", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    {"judge": judge, "labelled_judge": labelled_judge, "best_of": best_of, "ppo": ppo}[options.kind](options)


def judge(options: argparse.Namespace, pairs: Path | None = None) -> None:
    """A reward model from pairs; how often it is right about held-out ones."""
    import trimtab

    run = trimtab.rm(
        options.model,
        str(pairs or options.data / f"{options.pairs}.jsonl"),
        **{"save_path": str(options.save_path), "seed": options.seed, "bf16": options.bf16, "compile": "off"},
        **{"eval_dataset": str(options.data / "heldout.jsonl"), "overwrite": True, "fit_memory": False},
        **{"max_epochs": options.epochs, "learning_rate": options.learning_rate, "max_len": options.max_len},
        **{"train_batch_size": PAIRS_OF_A_STEP, "packing_samples": True, "train_max_tokens_per_gpu": 8192},
    )
    evaluated = [row for row in run.metrics if "eval_accuracy" in row]
    known = {name: value for name, value in evaluated[-1].items() if name.startswith("eval_")}
    grid.tell(final=True, steps=len(run.metrics), **known)


def labelled_judge(options: argparse.Namespace) -> None:
    """A reward model from pairs of the policy's own answers, which the gold judge has put in order."""
    import trimtab

    rows = _rows(options, options.pairs)
    pairs = options.save_path.with_suffix(".pairs.jsonl")
    trimtab.generate(
        options.model,
        [row["prompt"] for row in rows],
        options.gold,
        **{"output_path": str(pairs), "best_of_n": 2, "post_processor": "iter_dpo", **_answering(options, judged=True)},
    )
    judge(options, pairs)


def best_of(options: argparse.Namespace) -> None:
    """Of many answers to each held-out prompt the one that the proxy likes best, and what gold says of it."""
    import trimtab

    prompts = [row["prompt"] for row in _rows(options, "heldout")][: options.eval_prompts]
    answers = trimtab.generate(options.model, prompts, best_of_n=options.most, **_answering(options))
    count = len(answers) // options.most  # prompts that were short enough
    scores = {name: _judged(options, place, answers) for name, place in _judges(options).items()}
    proxy, gold = (
        [scores[name][begin * options.most : (begin + 1) * options.most] for begin in range(count)]
        for name in ("proxy", "gold")
    )
    grid.tell(final=True, agreement=_correlation(proxy, gold), prompts=count, answers=options.most)
    n = 1
    while 2 * n <= options.most:  # the last has two disjoint sets of answers behind it
        found = {
            name: estimates.interval([estimates.best_of(own, liked, n) for own, liked in zip(parts, proxy)])
            for name, parts in (("proxy", proxy), ("gold", gold))
        }
        grid.tell(n=n, kl_answer=estimates.kl_of_best_of(n), **found)
        n *= 2


def ppo(options: argparse.Namespace) -> None:
    """Paid by the proxy; gold counts for nothing, and is only asked."""
    import trimtab

    answers = options.prompts * options.answers
    settings: dict[str, Any] = {
        **{"save_path": str(options.save_path), "seed": options.seed, "bf16": options.bf16, "compile": "off"},
        **{"overwrite": True, "save_rollouts": 4, "normalize_reward": True, "reward_weights": [1.0, 0.0]},
        **{"input_key": "prompt", "apply_chat_template": True, "prompt_max_len": options.max_len},
        **{"generate_max_len": options.longest, "rollout_batch_size": options.prompts},
        **{"n_samples_per_prompt": options.answers, "train_batch_size": answers // 2, "max_steps": options.iterations},
        **{"num_episodes": 1000, "rollout_slots": max(answers, 256), "use_dynamic_batch": True},
        **{"train_max_tokens_per_gpu": 8192},
        # With a weight of 0 there is no reference, and no KL to be measured.
        **{"init_kl_coef": max(options.kl, 1e-6), "lr_scheduler": "constant_with_warmup"},
        **{"actor_learning_rate": options.learning_rate, "critic_learning_rate": options.critic_learning_rate},
        **{"eval_dataset": str(options.data / "heldout.jsonl"), "eval_steps": options.curve, "eval_temperature": 1},
        **{"eval_max_samples": options.eval_prompts, "eval_n_samples_per_prompt": 2},
    }
    judges = _judges(options)
    names = {Path(place).name: called for called, place in judges.items()}

    def tell(row: dict[str, Any]) -> None:
        found = {name: row[name] for name in row if name in FIGURES}
        for name, value in row.items():
            for folder, called in names.items():
                if f"reward/{folder}" in name:
                    found[name.replace(f"reward/{folder}", called)] = value
        if any(name.startswith("eval_") for name in found):
            found["said"] = _said(options.save_path, row["step"])
        grid.tell(step=row["step"], iteration_seconds=row.get("seconds"), **found)

    data = str(options.data / "train.jsonl")
    trimtab.ppo(options.model, data, list(judges.values()), on_iteration=tell, **settings)
    grid.tell(final=True)


def _said(folder: Path, step: int) -> list[dict[str, str]]:
    """To the first held-out prompts, the same ones every time: what is hacked is to be read, too, and a run that is cut
    has told it."""
    rows = grid.read(folder / "rollouts.jsonl")
    kept = [row for row in rows if (row["step"], row["group"]) == (step, "evaluation")]
    return [{name: row[name] for name in ("prompt", "response")} for row in kept]


def _answering(options: argparse.Namespace, *, judged: bool = False) -> dict[str, Any]:
    answering = {"max_new_tokens": options.longest, "temperature": 1.0, "top_p": 1.0, "bf16": options.bf16}
    answering |= {"max_num_seqs": 512, "micro_batch_size": JUDGED_AT_ONCE} if judged else {"max_num_seqs": 512}
    return answering | {"apply_chat_template": True, "prompt_max_len": options.max_len, "seed": options.seed}


def _judges(options: argparse.Namespace) -> dict[str, str]:
    return {"proxy": options.proxy, "gold": options.gold}


def _judged(options: argparse.Namespace, judge: str, answers: list[dict]) -> list[float]:
    """In the judge's own units: deviations from the mean of held-out pairs, as PPO gets them."""
    import trimtab

    passes = {"max_len": options.max_len + 128, "micro_batch_size": JUDGED_AT_ONCE}
    scored = trimtab.generate(judge, answers, eval_task="rm", bf16=options.bf16, **passes)
    units = json.loads((Path(judge) / "config.json").read_text())
    return [(row["reward"] - units["mean"]) / units["std"] for row in scored]


def _correlation(proxy: list[list[float]], gold: list[list[float]]) -> float:
    """Between the two judges' scores of one prompt's answers, mean over prompts."""
    import numpy as np

    own = [np.corrcoef(one, other)[0, 1] for one, other in zip(proxy, gold) if np.std(one) * np.std(other) > 0]
    return float(np.mean(own)) if own else 0.0


def _rows(options: argparse.Namespace, split: str) -> list[dict]:
    return [json.loads(line) for line in (options.data / f"{split}.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
