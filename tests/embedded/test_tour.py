import re
from argparse import Namespace

import pytest

from trimtab.cli import quickstart
from trimtab.cli.main import main
from trimtab.cli.quickstart import Lesson
from trimtab.embedded import sort_task

RUNS = ("sft", "grpo", "ppo", "dpo", "kto")


def closing_table(output: str) -> dict[str, int]:
    """Held-out success in per cent, by method."""
    rows = re.findall(r"^(SFT|SFT, \w+) {2,}\S.*? (\d+)% +\d+ *$", output, re.MULTILINE)
    return {name.removeprefix("SFT, ").lower(): int(success) for name, success in rows}


@pytest.mark.long
def test_a_short_tour_leaves_a_report_of_every_run_and_a_page_that_compares_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sort_task, "JUDGED_ROWS", 64)
    folder = tmp_path / "tour"
    assert main(["tour", "--folder", str(folder), "--steps", "2", "--iterations", "1"]) == 0
    printed = capsys.readouterr().out
    assert tuple(closing_table(printed)) == RUNS
    page = (folder / "comparison.html").read_text()
    assert all(f"<b>{run}</b>" in page for run in RUNS)
    assert all((folder / run / "report.html").is_file() for run in (*RUNS, "rm"))
    answer = sort_task.reference_of(sort_task.make_rows(1, 0, held_out=True)[0])
    assert all(answer in (folder / run / "report.html").read_text() for run in ("grpo", "ppo", "dpo", "kto"))


def test_every_method_starts_from_the_same_model(tmp_path):
    lesson = Lesson(Namespace(folder=tmp_path, seed=0, steps=1, iterations=1))
    for words in (quickstart.rm_words, quickstart.ppo_words, quickstart.dpo_words, quickstart.kto_words):
        command = words(lesson)
        assert command[command.index("--pretrain") + 1] == str(tmp_path / "sft")


@pytest.mark.long
def test_every_method_of_the_whole_tour_raises_the_true_success(tmp_path, capsys):
    assert main(["tour", "--folder", str(tmp_path / "tour")]) == 0
    success = closing_table(capsys.readouterr().out)
    assert success["sft"] < 50
    assert success["grpo"] > 90
    assert all(success[method] > 70 for method in ("ppo", "dpo", "kto")), success
