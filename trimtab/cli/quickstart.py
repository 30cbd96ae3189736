"""`trimtab quickstart`: a tiny model learns to sort digits while you watch; offline, on a CPU, in about a minute.

It makes a model and data, runs `trimtab sft`, shows a few answers, runs `trimtab grpo` and shows them again. `trimtab
tour` goes on with every way of learning from feedback that this project has for the task, in a few minutes, and ends
with a table of how many held-out questions each sorts as it should and a page that compares the runs. `Lesson` shows
commands and runs them in this process.

Success is the share of held-out questions to which an answer drawn at temperature 1 is exactly right, so a model of two
habits shows both. The random streams are those of RL's evaluation: a figure here is the one in the run's report.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.cli.main import CommandParser, guarded
from trimtab.errors import UserError
from trimtab.files import write_json

if TYPE_CHECKING:
    from rich.table import Table


STEPS, ROWS_A_STEP = 300, 64
ITERATIONS, PROMPTS_AN_ITERATION = 80, 32
DESCENDING_SHARE = 0.65  # of the examples: the habit to unlearn
ANSWER_TOKENS = "12"  # a few more than the longest right answer has
SHOWN = 6


class Stopped(Exception):
    """A command ended with this exit code, and has said why."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


@dataclass(frozen=True)
class Answers:
    """What one model said to the held-out questions."""

    words: list[str]
    right: list[bool]

    @property
    def success(self) -> float:
        return sum(self.right) / len(self.right)


def lesson_main(verb: str, description: str, argv: Sequence[str] | None, course: Callable[[Lesson], None]) -> int:
    """Run a course of lessons with the words on the command line, and return the exit code."""

    def start() -> int:
        options = _parsed(verb, description, sys.argv[1:] if argv is None else argv)
        try:
            course(Lesson(options))
        except Stopped as stopped:
            return stopped.exit_code
        return 0

    return guarded(f"trimtab {verb}", start)


def _parsed(verb: str, description: str, argv: Sequence[str]) -> Namespace:
    parser = CommandParser(f"trimtab {verb}", description)
    parser.add_argument("--folder", type=Path, default=Path(verb), help="where everything is written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model, the data and the training")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of SFT, of {ROWS_A_STEP} examples each")
    parser.add_argument(
        "--iterations", type=int, default=ITERATIONS, help=f"iterations of RL, of {PROMPTS_AN_ITERATION} prompts each"
    )
    options = parser.parse_args(argv)
    for name in ("steps", "iterations"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}")
    if "," in str(options.folder):
        raise UserError(f"--folder {options.folder}: a comma separates data sets; give a folder without one")
    return options


class Lesson:
    """A folder in which models learn, and a console on which that is told."""

    def __init__(self, options: Namespace):
        from rich.console import Console

        self.folder, self.seed = options.folder, options.seed
        self.steps, self.iterations = options.steps, options.iterations
        self.console = Console(highlight=False)
        self.began = time.perf_counter()

    @property
    def task(self) -> Path:
        return self.folder / "task"

    def say(self, text: str = "", *, markup: bool = True) -> None:
        """A paragraph; the console's mark-up is meant, and long paths stay whole."""
        self.console.print(text, soft_wrap=True, markup=markup)

    def make_task(self) -> None:
        """A model of random weights, and data of which most show the wrong habit."""
        with self.console.status("Loading PyTorch and Transformers ..."):
            from transformers.utils import logging

            from trimtab.embedded import sort_task

            logging.disable_progress_bar()
        try:
            sort_task.write(
                self.task,
                self.seed,
                train_rows=self.steps * ROWS_A_STEP,
                judged_rows=max(sort_task.JUDGED_ROWS, self.iterations * PROMPTS_AN_ITERATION),
                descending_share=DESCENDING_SHARE,
            )
        except OSError as error:
            raise UserError(
                f"--folder {self.folder}: {error.strerror}; give a folder that can be written to"
            ) from error
        self.questions = sort_task.make_rows(sort_task.TEST_ROWS, self.seed, held_out=True)

    def run(self, verb: str, words: Sequence[str]) -> float:
        """Show a command, run it, and return the seconds it took."""
        from trimtab.cli.main import main

        self.console.print(f"\n  {readable_command(verb, words)}\n", style="cyan", markup=False, soft_wrap=True)
        began = time.perf_counter()
        exit_code = main([verb, *words])
        if exit_code != 0:
            raise Stopped(exit_code)
        return time.perf_counter() - began

    # ---- commands

    def fixed_data_words(self, data: str, start: str = "sft") -> list[str]:
        """What jobs that learn from fixed data have in common; `start`: the run or folder to start from."""
        return [
            *("--pretrain", str(self.folder / start)),
            *("--dataset", str(self.task / f"{data}.jsonl")),
            *("--max_len", "64"),
            *("--train_batch_size", str(ROWS_A_STEP), "--micro_train_batch_size", str(ROWS_A_STEP)),
        ]

    def rl_words(self, iterations: int) -> list[str]:
        """What RL jobs have in common. An iteration is one optimiser step on 8 answers to each of its prompts."""
        return [
            *("--pretrain", str(self.folder / "sft")),
            *("--prompt_data", str(self.task / "prompts.jsonl")),
            *("--input_key", "input", "--label_key", "label", "--apply_chat_template"),
            *("--max_samples", str(iterations * PROMPTS_AN_ITERATION)),
            *("--rollout_batch_size", str(PROMPTS_AN_ITERATION), "--n_samples_per_prompt", "8"),
            *("--train_batch_size", str(PROMPTS_AN_ITERATION * 8), "--use_dynamic_batch"),
            *("--prompt_max_len", "64", "--generate_max_len", ANSWER_TOKENS),
            *("--eval_dataset", str(self.task / "prompts_test.jsonl"), "--eval_steps", "5"),
            *("--eval_temperature", "1", "--eval_n_samples_per_prompt", "1"),
        ]

    def place_words(self, run: str) -> list[str]:
        return [
            *("--seed", str(self.seed)),
            *("--save_path", str(self.folder / run), "--overwrite"),
        ]

    # ---- what was learnt

    def answers(self, run: str) -> Answers:
        """What the model of a run says to the held-out questions: `trimtab generate`, quietly."""
        from trimtab.cli.batch_inference import main

        output = self.folder / "answers" / f"{run}.jsonl"
        shutil.rmtree(f"{output}.partial", ignore_errors=True)  # of a quickstart that was interrupted here
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            exit_code = main(self._generate_words(run, output))
        if exit_code != 0:
            print(told.getvalue(), file=sys.stderr, end="")
            raise Stopped(exit_code)
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        return Answers([row["output"] for row in rows], [row["reward"] == 1 for row in rows])

    def _generate_words(self, run: str, output: Path) -> list[str]:
        from trimtab.train.rl.rollout_client import EVALUATION_SEED

        return [
            *("--pretrain", str(self.folder / run)),
            *("--dataset", str(self.task / "prompts_test.jsonl")),
            *("--input_key", "input", "--label_key", "label", "--apply_chat_template"),
            *("--reward_verifier", "exact"),
            *("--max_new_tokens", ANSWER_TOKENS, "--temperature", "1", "--seed", str(EVALUATION_SEED)),
            *("--output_path", str(output)),
        ]

    def keep_samples(self, run: str, before: Answers, after: Answers) -> Path:
        """Put answers before and after into the report of a run; returns the report."""
        from trimtab.embedded.sort_task import prompt_of, reference_of
        from trimtab.report.page import write_report

        samples = [
            {"prompt": prompt_of(row), "before": old, "after": new, "reference": reference_of(row)}
            for row, old, new in zip(self.questions, before.words, after.words)
        ][:SHOWN]
        write_json(self.folder / run / "samples.json", samples, indent=1)
        return write_report(self.folder / run)

    def table(self, columns: dict[str, Answers]) -> Table:
        """A few held-out questions with the answers of several models."""
        from rich.table import Table
        from rich.text import Text

        from trimtab.embedded.sort_task import prompt_of, reference_of

        table = Table("prompt", *columns, "right answer", box=None, padding=(0, 3, 0, 0), header_style="bold")
        for i, row in enumerate(self.questions[:SHOWN]):
            cells = [
                Text(
                    f"{'✓' if a.right[i] else '✗'} {a.words[i].strip() or '(nothing)'}",
                    "green" if a.right[i] else "red",
                )
                for a in columns.values()
            ]
            table.add_row(Text(prompt_of(row)), *cells, Text(reference_of(row)))
        return table


def readable_command(verb: str, words: Sequence[str]) -> str:
    """The command over several lines, ready to paste into a shell."""
    lines, current = [], f"trimtab {verb}"
    for word in words:
        if word.startswith("--") and len(current) > 70:
            lines.append(current)
            current = "   "
        current += f" {shlex.quote(word)}"
    return " \\\n  ".join([*lines, current])


def program() -> str:
    """What to type: the bare name where the shell finds it, else its place beside this Python."""
    return "trimtab" if shutil.which("trimtab") else os.path.relpath(Path(sys.executable).parent / "trimtab")


# ---- the quickstart


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


# ---- the tour: the same two lessons, then from the same SFT model a reward model, PPO with it, DPO and KTO


@dataclass(frozen=True)
class Stage:
    """A run of the tour, for the closing table."""

    run: str
    source: str
    success: float
    seconds: float


def tour_main(argv: Sequence[str] | None = None) -> int:
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
    stages.append(_learn(lesson, before, "ppo", ppo_words(lesson), "the reward model", of_the_model))
    lesson.say("\n[bold]5. DPO[/] learns from the same pairs directly, with neither reward model nor sampling:")
    stages.append(_learn(lesson, before, "dpo", dpo_words(lesson), "pairs of answers"))
    lesson.say("\n[bold]6. KTO[/] needs no pairs, only answers that were called good or bad:")
    stages.append(_learn(lesson, before, "kto", kto_words(lesson), "single answers, good or bad"))

    lesson.say()
    lesson.console.print(_closing_table(stages))
    page = write_comparison([lesson.folder / stage.run for stage in stages], lesson.folder / "comparison.html")
    lesson.say(f"\n  compare  {page} (open it in a browser)", markup=False)
    lesson.say(f"  reports  {lesson.folder}/*/report.html", markup=False)
    lesson.say(f"\nDone in {time.perf_counter() - lesson.began:.0f} s.")


def _learn(
    lesson: Lesson, before: Answers, verb: str, words: list[str], source: str, earlier_seconds: float = 0.0
) -> Stage:
    """Train by one method and look at what came of it. `earlier_seconds`: what its reward took to train."""
    seconds = lesson.run(verb, words)
    after = lesson.answers(verb)
    lesson.keep_samples(verb, before, after)
    lesson.say(f"\nRight on held-out numbers: {before.success:.0%} after SFT, [bold]{after.success:.0%}[/] now.")
    return Stage(verb, source, after.success, earlier_seconds + seconds)


def _closing_table(stages: Sequence[Stage]) -> Table:
    from rich.table import Table

    table = Table("method", "learns from", box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("held-out success", justify="right")
    table.add_column("seconds", justify="right")
    for stage in stages:
        name = stage.run.upper() if stage.run == "sft" else f"SFT, {stage.run.upper()}"
        table.add_row(name, stage.source, f"{stage.success:.0%}", f"{stage.seconds:.0f}")
    return table


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
