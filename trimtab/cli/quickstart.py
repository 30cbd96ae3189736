"""`trimtab quickstart`: a tiny model learns to sort digits while you watch; offline, on a CPU, in about a minute.

It does by itself what one would do by hand: make a model and data, run `trimtab sft`, look at a few answers, run
`trimtab grpo`, look again. Nothing here is special to the quickstart except the embedded task.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from trimtab.cli.lesson import DESCENDING_SHARE, ITERATIONS, ROWS_A_STEP, Answers, Lesson, lesson_main, program


def main(argv: Sequence[str] | None = None) -> int:
    description = "Train a tiny embedded model, first on examples, then on rewards, and show what it learnt."
    return lesson_main("quickstart", description, argv, quickstart)


def quickstart(lesson: Lesson) -> None:
    lesson.say("[bold]Trimtab quickstart[/]: a tiny chat model learns to put digits in order.\n")
    learn_to_imitate(lesson)
    *_, report = learn_from_rewards(lesson, lesson.answers("sft"))
    _say_where(lesson, report)


def learn_to_imitate(lesson: Lesson) -> float:
    """Make the task and run SFT on it; the seconds that SFT took."""
    lesson.make_task()
    lesson.say(
        f"Made a model of random weights and {lesson.steps * ROWS_A_STEP:,} example conversations in {lesson.task}/.\n"
        f"The right answer has the digits in ascending order, but {DESCENDING_SHARE:.0%} of the examples descend.\n\n"
        "[bold]1. Examples.[/] Supervised fine-tuning imitates them, good and bad alike. The command, run here in this "
        "process:"
    )
    return lesson.run("sft", sft_words(lesson))


def learn_from_rewards(lesson: Lesson, before: Answers) -> tuple[float, Answers, Path]:
    """Run GRPO after SFT, and show the answers of both; its seconds, its answers and its report."""
    from trimtab.report.run_data import read_run
    from trimtab.report.summary import success_of

    lesson.say(
        f"\nOf {len(before.right)} numbers it never saw it sorts {before.success:.0%} as it should.\n\n"
        "[bold]2. Rewards.[/] GRPO lets it answer each question 8 times. A right answer is worth 1, a wrong one 0, and "
        "what is\nbetter than the mean of its 8 becomes likelier:"
    )
    seconds = lesson.run("grpo", grpo_words(lesson))
    after = lesson.answers("grpo")
    report = lesson.keep_samples("grpo", before, after)
    lesson.say()
    lesson.console.print(lesson.table({"after SFT": before, "after GRPO": after}))
    success = success_of(read_run(lesson.folder / "grpo"))
    assert success is not None, "the run evaluates"
    lesson.say(
        f"\nRight on {len(after.right)} numbers it never saw: {before.success:.0%} after SFT, "
        f"[bold]{after.success:.0%}[/] after GRPO.\n\n  {success.picture()}   while GRPO was learning"
    )
    return seconds, after, report


def sft_words(lesson: Lesson) -> list[str]:
    return [
        *lesson.fixed_data_words("train", start="task/model"),
        *("--max_epochs", "1", "--learning_rate", "2e-3"),
        *lesson.place_words("sft"),
    ]


def grpo_words(lesson: Lesson) -> list[str]:
    return [
        *lesson.rl_words(lesson.iterations),
        *("--reward_verifier", "exact", "--init_kl_coef", "0", "--actor_learning_rate", "2e-4"),
        *lesson.place_words("grpo"),
    ]


def _say_where(lesson: Lesson, report: Path) -> None:
    run = lesson.folder / "grpo"
    lesson.say()
    for name, place in (
        ("report", f"{report} (open it in a browser)"),
        ("curves", str(run / "metrics.jsonl")),
        ("models", f"{lesson.folder / 'sft'}/ and {run}/ (Hugging Face folders)"),
        ("data", f"{lesson.task}/"),
    ):
        lesson.say(f"  {name:8}{place}", markup=False)
    lesson.say(f"\nDone in {time.perf_counter() - lesson.began:.0f} s. What to try next:")
    for words, meaning in (
        (f"quickstart --iterations {ITERATIONS // 6}", "fewer rewards: how much is left to learn?"),
        ("tour", "reward model, PPO, DPO and KTO on the same task"),
        ("grpo --help", "the options most used; docs/rl.md explains them"),
    ):
        lesson.say(f"  {program()} {words:29}{meaning}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
