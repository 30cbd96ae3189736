"""One job of skill.py's grid, in a process of its own: an SFT, a run of RL, or what the model as it came can do.

What is told while it works goes to the grid (grid.tell): the figures of every iteration, and at the end what the model
makes of the prompts of a split. `python skill_job.py --help`; skill.py writes these commands.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import estimates
import grid
import skill_tasks

PRESETS = {"grpo": "grpo", "dapo": "dapo", "rloo": "rloo", "reinforce++": "reinforce", "ppo": "ppo"}
FIGURES = ("reward", "length", "truncated", "sampled_entropy", "equal_groups", "filtered_groups", "clip_fraction")
FIGURES += ("grad_norm", "explained_variance", "memory_gib", "seconds_rollout", "seconds_scoring", "seconds_update")
K = 8  # of pass@k


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["base", "sft", *PRESETS])
    parser.add_argument("--task", required=True, choices=list(skill_tasks.TASKS))
    parser.add_argument("--model", required=True, help="folder to start from")
    parser.add_argument("--reference", help="folder that the KL is measured to; unset: --model")
    parser.add_argument("--data", required=True, type=Path, help="folder with the task's splits")
    parser.add_argument("--save_path", help="where the trained model goes")
    parser.add_argument("--split", default="validation", help="whose prompts are answered at the end")
    parser.add_argument("--curve", type=int, default=0, help="answer some of them every so many iterations, too")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--critic_learning_rate", type=float, default=5e-5)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32, help="of an iteration; of an SFT: rows of a step")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimiser steps of an iteration")
    parser.add_argument("--sft_rows", type=int, default=512)
    parser.add_argument("--eval_rows", type=int, default=256)
    parser.add_argument("--eval_answers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    model = options.model
    if options.kind == "sft":
        model = sft(options)
    elif options.kind != "base":
        model = rl(options)
    told = {"split": options.split, "prompts": options.eval_rows, "answers": options.eval_answers}
    told["learning_rate"] = None if options.kind == "base" else options.learning_rate
    grid.tell(final=True, **told, **evaluate(options, model))


def sft(options: argparse.Namespace) -> str:
    """A short one on solutions: the form, and so much of the skill that some answers are right."""
    import trimtab

    run = trimtab.sft(
        options.model,
        str(options.data / "sft.jsonl"),
        **{"save_path": options.save_path, "seed": options.seed, "bf16": options.bf16, "compile": "off"},
        **{"input_key": "prompt", "output_key": "solution", "apply_chat_template": True, "max_len": 512},
        **{"max_samples": options.sft_rows, "max_epochs": 1, "learning_rate": options.learning_rate},
        **{"train_batch_size": options.prompts, "packing_samples": True, "train_max_tokens_per_gpu": 8192},
        **{"fit_memory": False, "overwrite": True},
        on_iteration=lambda row: grid.tell(step=row["step"], loss=row["loss"]),
    )
    return str(run.path)


def rl(options: argparse.Namespace) -> str:
    """All methods get the same prompts, each once, and as many answers to each: DAPO makes fewer iterations of them."""
    import trimtab

    longest = skill_tasks.TASKS[options.task].longest
    answers = options.prompts * options.answers
    settings: dict[str, Any] = {
        **{"save_path": options.save_path, "seed": options.seed, "bf16": options.bf16, "compile": "off"},
        **{"overwrite": True, "save_rollouts": 2},
        **{"input_key": "prompt", "label_key": "label", "apply_chat_template": True},
        **{"max_samples": options.iterations * options.prompts, "rollout_batch_size": options.prompts},
        **{"n_samples_per_prompt": options.answers, "train_batch_size": answers // options.updates},
        **{"prompt_max_len": 320, "generate_max_len": longest, "rollout_slots": max(answers, 256)},
        **{"use_dynamic_batch": True, "train_max_tokens_per_gpu": 8192},
        **{"init_kl_coef": 0, "actor_learning_rate": options.learning_rate, "lr_scheduler": "constant_with_warmup"},
    }
    if options.kind == "ppo":
        settings["critic_learning_rate"] = options.critic_learning_rate
    if options.kind == "dapo":
        # What the last round has more of than an iteration needs is lost: rounds that are not too large.
        settings["vllm_generate_batch_size"] = max(1, options.prompts // 2)
    if options.curve:
        settings |= {"eval_dataset": str(options.data / f"{options.split}.jsonl"), "eval_steps": options.curve}
        settings |= {"eval_max_samples": options.eval_rows // 2, "eval_n_samples_per_prompt": K, "eval_temperature": 1}
    train = getattr(trimtab, PRESETS[options.kind])

    def tell(row: dict[str, Any]) -> None:
        found = {name: row[name] for name in row if name in FIGURES or name.startswith("eval_pass")}
        # Groups that are left out were drawn as well; a row of step 0 has nothing but an evaluation.
        drawn = round(row.get("epoch", 0) * options.iterations * options.prompts) * options.answers
        grid.tell(step=row["step"], drawn=drawn, iteration_seconds=row.get("seconds"), **found)

    run = train(options.model, str(options.data / "train.jsonl"), right, on_iteration=tell, **settings)
    return str(run.path)


def right(prompts: list[str], completions: list[str], label: list[str], **columns: Any) -> list[float]:
    """1 for a right answer, else 0: nothing is paid for the form."""
    return [float(skill_tasks.is_right(said, wanted)) for said, wanted in zip(completions, label)]


def evaluate(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Of a split's prompts, several answers each at temperature 1."""
    import trimtab

    rows = [json.loads(line) for line in (options.data / f"{options.split}.jsonl").read_text().splitlines()]
    rows = rows[: options.eval_rows]
    reference = options.reference or options.model
    learner = trimtab.Learner(model, bf16=options.bf16, reference=reference)
    samples = learner.sample(
        [[{"role": "user", "content": row["prompt"]}] for row in rows],
        options.eval_answers,
        seeds=list(range(len(rows))),
        # A model that was shown no solution has its own way of answering, and room for it.
        max_new_tokens=skill_tasks.TASKS[options.task].longest * (4 if options.kind == "base" else 1),
    )
    own, before = learner.log_probs(samples), learner.log_probs(samples, reference=True)
    texts = [sample.text for sample in samples]
    labels = [row["label"] for row in rows for _ in range(options.eval_answers)]
    found = figures(texts, labels, options.eval_answers)
    tokens = sum(len(one) for one in own)
    found |= {
        "length": tokens / len(samples),
        "truncated": sum(sample.finish == "length" for sample in samples) / len(samples),
        "kl_answer": sum(float((new - old).sum()) for new, old in zip(own, before)) / len(samples),
        "entropy": -sum(float(one.sum()) for one in own) / tokens,
        "examples": texts[:2],
    }
    return found


def figures(texts: Sequence[str], labels: Sequence[str], answers: int) -> dict[str, Any]:
    """Answers to one prompt stand beside each other. Intervals are of new prompts."""
    right = [skill_tasks.is_right(text, label) for text, label in zip(texts, labels)]
    groups = [right[begin : begin + answers] for begin in range(0, len(right), answers)]
    has_form = [skill_tasks.parsed(text) is not None for text in texts]
    at_the_end = [skill_tasks.is_right_at_the_end(text, label) for text, label in zip(texts, labels)]
    found: dict[str, Any] = {f"pass_{k}": [estimates.pass_at(group, k) for group in groups] for k in (1, K)}
    return {name: estimates.interval(of_prompts) for name, of_prompts in found.items()} | {
        "parsed": sum(has_form) / len(texts),
        "right_of_parsed": sum(right) / max(1, sum(has_form)),
        "right_at_the_end": sum(at_the_end) / len(texts),
        "solved": sum(any(group) for group in groups) / len(groups),
    }


if __name__ == "__main__":
    main()
