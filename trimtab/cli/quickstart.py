"""`trimtab quickstart`: a tiny model learns to sort digits while you watch; offline, on a CPU, in about a minute.

It does by itself what one would do by hand: make a model and data, look at a few answers, run `trimtab sft`, look
again. Nothing here is special to the quickstart except the embedded task.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.cli.run import guarded
from trimtab.cli.words import Words
from trimtab.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STEPS = 300
BATCH = 64
SHOWN = 6


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("trimtab quickstart", lambda: _start(sys.argv[1:] if argv is None else argv))


def _start(argv: Sequence[str]) -> int:
    words = Words("trimtab quickstart", "Train a tiny embedded model for about a minute and show what it learnt.")
    words.add_argument("--folder", type=Path, default=Path("quickstart"), help="where everything is written")
    words.add_argument("--seed", type=int, default=0, help="seed of the model, the data and the training")
    words.add_argument("--steps", type=int, default=STEPS, help=f"optimiser steps of {BATCH} rows each")
    options = words.parse_args(argv)
    if options.steps < 1:
        raise UserError(f"--steps must be at least 1, not {options.steps}")
    if "," in str(options.folder):
        raise UserError(f"--folder {options.folder}: a comma separates data sets; give a folder without one")
    return quickstart(options.folder, options.seed, options.steps)


def quickstart(folder: Path, seed: int, steps: int) -> int:
    """Make the task, answer, train, answer again; returns the exit code of the training."""
    from rich.console import Console

    console = Console(highlight=False)
    started = time.perf_counter()
    console.print("[bold]Trimtab quickstart[/]: a tiny chat model learns to put digits in order.\n")
    with console.status("Loading PyTorch and Transformers ..."):
        from transformers.utils import logging

        from trimtab.cli import train_sft
        from trimtab.embedded import sort_task
        from trimtab.report.page import write_report

        logging.disable_progress_bar()
    task, run = folder / "task", folder / "sft"
    try:
        sort_task.write(task, seed, train_rows=steps * BATCH)
        (run / "samples.json").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--folder {folder}: {error.strerror}; give a folder that can be written to") from error
    test = sort_task.make_rows(sort_task.TEST_ROWS, seed, held_out=True)
    prompts, references = [sort_task.prompt_of(row) for row in test], [sort_task.reference_of(row) for row in test]
    before = _answers(task / "model", prompts)
    console.print(
        f"Made a model of random weights and {steps * BATCH:,} example conversations in {task}/.", soft_wrap=True
    )
    console.print("What it answers before training:")
    for prompt, words in list(zip(prompts, before))[:3]:
        console.print(f"  {prompt}  {words.strip() or '(nothing)'}", style="dim", markup=False)

    command = sft_command(task, run, folder / "checkpoints", seed)
    console.print("\nNow it learns from the examples. This is the command, run here in this process:\n")
    console.print(f"  {readable_command(command)}\n", style="cyan", markup=False, soft_wrap=True)
    exit_code = train_sft.main(command)
    if exit_code != 0:
        return exit_code

    after = _answers(run, prompts)
    samples = [
        {"prompt": prompt, "before": old, "after": new, "reference": reference}
        for prompt, old, new, reference in zip(prompts, before, after, references)
    ][:SHOWN]
    (run / "samples.json").write_text(json.dumps(samples, indent=1) + "\n", encoding="utf-8")
    report = write_report(run)
    console.print()
    console.print(before_and_after(samples))
    rates = [sort_task.success_rate(answers, references) for answers in (before, after)]
    console.print(
        f"\nExactly right on {len(test)} numbers it never saw: "
        f"{rates[0]:.0%} before, [bold]{rates[1]:.0%}[/] after training."
    )
    _say_where(console, folder, run, report, time.perf_counter() - started)
    return 0


def sft_command(task: Path, run: Path, checkpoints: Path, seed: int) -> list[str]:
    """The words after `trimtab sft`."""
    return [
        *("--pretrain", str(task / "model")),
        *("--dataset", str(task / "train.jsonl")),
        *("--eval_dataset", str(task / "test.jsonl")),
        *("--max_len", "64"),
        *("--max_epochs", "1"),
        *("--train_batch_size", str(BATCH)),
        *("--micro_train_batch_size", str(BATCH)),
        *("--learning_rate", "2e-3"),
        *("--eval_steps", "50"),
        *("--seed", str(seed)),
        *("--save_path", str(run)),
        *("--ckpt_path", str(checkpoints)),
    ]


def readable_command(command: Sequence[str]) -> str:
    """The command over several lines, ready to paste into a shell."""
    lines, current = [], "trimtab sft"
    for word in command:
        if word.startswith("--") and len(current) > 70:
            lines.append(current)
            current = "   "
        current += f" {shlex.quote(word)}"
    return " \\\n  ".join([*lines, current])


def before_and_after(samples: Sequence[dict[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("prompt", "before", "after", "right answer", box=None, padding=(0, 3, 0, 0), header_style="bold")
    for sample in samples:
        cells = [Text(sample["prompt"])]
        for name in ("before", "after"):
            right = sample[name] == sample["reference"]
            words = sample[name].strip() or "(nothing)"
            cells.append(Text(f"{'✓' if right else '✗'} {words}", style="green" if right else "red"))
        table.add_row(*cells, Text(sample["reference"]))
    return table


def _answers(model_folder: Path, prompts: Sequence[str]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trimtab.embedded import sort_task
    from trimtab.evaluate.answers import answer

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return answer(model, tokenizer, prompts, max_new_tokens=sort_task.LONGEST_ANSWER_TOKENS)


def _say_where(console: Console, folder: Path, run: Path, report: Path, seconds: float) -> None:
    console.print()
    for name, place in (
        ("report", f"{report} (open it in a browser)"),
        ("curves", str(run / "metrics.jsonl")),
        ("model", f"{run}/ (a Hugging Face folder)"),
        ("data", f"{folder / 'task'}/"),
    ):
        console.print(f"  {name:8}{place}", markup=False, soft_wrap=True)
    console.print(f"\nDone in {seconds:.0f} s. What to try next:")
    for words, meaning in (
        (f"quickstart --steps {STEPS // 3}", "a shorter lesson: how much is left?"),
        ("sft --help", "every option of the job"),
        ("sft --pretrain MODEL --dataset DATA", "your own model and data: see docs/sft.md"),
    ):
        console.print(f"  {_program()} {words:37}{meaning}", markup=False, soft_wrap=True)


def _program() -> str:
    """What to type: the bare name where the shell finds it, else its place beside this Python."""
    return "trimtab" if shutil.which("trimtab") else os.path.relpath(Path(sys.executable).parent / "trimtab")


if __name__ == "__main__":
    raise SystemExit(main())
