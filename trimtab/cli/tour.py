"""`trimtab tour`: one task, and every way of learning from feedback that this project has for it, in a few minutes.

The quickstart's two lessons, then from the same SFT model: a reward model, PPO with it, DPO, KTO. At the end a table of
how many held-out questions each sorts as it should, and a page that compares the runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.cli.quickstart import Answers, Lesson, learn_from_rewards, learn_to_imitate, lesson_main

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Stage:
    """A run of the tour, for the closing table."""

    run: str
    source: str
    success: float
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    description = "Train a tiny embedded model by SFT, GRPO, PPO with a reward model, DPO and KTO, and compare them."
    return lesson_main("tour", description, argv, tour)


def tour(lesson: Lesson) -> None:
    from trimtab.report.comparison import write_comparison

    lesson.say("[bold]A tour of Trimtab[/]: a tiny chat model learns to put digits in order, in several ways.\n")
    seconds = learn_to_imitate(lesson)
    before = lesson.answers("sft")
    stages = [Stage("sft", "examples, most of them wrong", before.success, seconds)]
    seconds, after, _ = learn_from_rewards(lesson, before)
    stages.append(Stage("grpo", "right or wrong, from a verifier", after.success, seconds))

    lesson.say(
        "\n[bold]3. A reward model.[/] Without a verifier, rewards can be learnt from pairs of answers of which one is "
        "preferred:"
    )
    of_the_model = lesson.run("rm", rm_words(lesson))
    lesson.say("\n[bold]4. PPO[/] with the reward model, and a critic that starts as a copy of it:")
    stages.append(_stage(lesson, before, "ppo", ppo_words(lesson), "the reward model", of_the_model))
    lesson.say("\n[bold]5. DPO[/] learns from the same pairs directly, with neither reward model nor sampling:")
    stages.append(_stage(lesson, before, "dpo", dpo_words(lesson), "pairs of answers"))
    lesson.say("\n[bold]6. KTO[/] needs no pairs, only answers that were called good or bad:")
    stages.append(_stage(lesson, before, "kto", kto_words(lesson), "single answers, good or bad"))

    lesson.say()
    lesson.console.print(_table(stages))
    page = write_comparison([lesson.folder / stage.run for stage in stages], lesson.folder / "comparison.html")
    lesson.say(f"\n  compare  {page} (open it in a browser)", markup=False)
    lesson.say(f"  reports  {lesson.folder}/*/report.html", markup=False)
    lesson.say(f"\nDone in {time.perf_counter() - lesson.began:.0f} s.")


def _stage(
    lesson: Lesson, before: Answers, verb: str, words: list[str], source: str, earlier_seconds: float = 0.0
) -> Stage:
    """Train by one method and look at what came of it. `earlier_seconds`: what its reward took to train."""
    seconds = lesson.run(verb, words)
    after = lesson.answers(verb)
    lesson.keep_samples(verb, before, after)
    lesson.say(f"\nRight on held-out numbers: {before.success:.0%} after SFT, [bold]{after.success:.0%}[/] now.")
    return Stage(verb, source, after.success, earlier_seconds + seconds)


def _table(stages: Sequence[Stage]) -> Table:
    from rich.table import Table

    table = Table("method", "learns from", box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("held-out success", justify="right")
    table.add_column("seconds", justify="right")
    for stage in stages:
        name = stage.run.upper() if stage.run == "sft" else f"SFT, {stage.run.upper()}"
        table.add_row(name, stage.source, f"{stage.success:.0%}", f"{stage.seconds:.0f}")
    return table


# ---- commands


def rm_words(lesson: Lesson) -> list[str]:
    return [
        *lesson.fixed_data_words("pairs"),
        *("--eval_dataset", str(lesson.task / "pairs_test.jsonl"), "--eval_steps", "16"),
        *("--learning_rate", "3e-4"),
        *lesson.place_words("rm"),
    ]


def ppo_words(lesson: Lesson) -> list[str]:
    # The reward model has seen only wrong orders. A weak KL lets the policy find wrong digits that it likes as well.
    return [
        *lesson.rl_words(max(1, lesson.iterations // 2)),
        *("--reward_pretrain", str(lesson.folder / "rm"), "--init_kl_coef", "0.1"),
        *("--actor_learning_rate", "2e-4", "--critic_learning_rate", "5e-4"),
        *lesson.place_words("ppo"),
    ]


def dpo_words(lesson: Lesson) -> list[str]:
    return [
        *lesson.fixed_data_words("pairs"),
        *("--beta", "1", "--nll_loss_coef", "0.2", "--learning_rate", "1e-4"),
        *lesson.place_words("dpo"),
    ]


def kto_words(lesson: Lesson) -> list[str]:
    return [
        *lesson.fixed_data_words("unpaired"),
        *("--beta", "0.5", "--learning_rate", "1e-4"),
        *lesson.place_words("kto"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
