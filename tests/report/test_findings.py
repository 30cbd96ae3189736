"""Each sentence appears when its condition holds, and a healthy run has none."""

from pathlib import Path

import pytest

from trimtab.report.findings import findings
from trimtab.report.run_data import RunData


def run_of(losses, folder: Path, data: dict | None = None, job: str = "sft", **columns) -> RunData:
    (folder / "config.json").write_text("{}")
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    for name, values in columns.items():
        for row, value in zip(rows, values):
            row[name] = value
    return RunData(folder, rows=rows, manifest={"data": data or {}}, job=job)


FALLING = [3.0 - step / 20 for step in range(40)]


def test_a_falling_loss_and_clean_data_say_nothing(tmp_path):
    data = {"rows_read": 100, "rows_kept": 95, "rows_truncated": 5, "rows_over_long": 5}
    steady = run_of(FALLING, tmp_path, data, grad_norm=[1.0] * 40, skipped_steps=[0] * 40, eval_loss=[3, 2, 1])
    assert findings(steady) == []


@pytest.mark.parametrize(
    ("losses", "data", "columns", "words"),
    [
        ([2.0] * 40, {}, {}, "The loss hardly moved"),
        (
            FALLING,
            {},
            {"alarms": [[]] * 38 + [["the loss began at 2 and is 7.1e+3"], ["the loss began at 2 and is 9"]]},
            "The loss began at 2 and is 9 (steps 39, 40, 2 of 40; the figures are those of 40).",
        ),
        (FALLING, {}, {"skipped_steps": [0] * 20 + [1] * 20}, "1 optimiser step was skipped"),
        (FALLING, {}, {"skipped_steps": [0] * 20 + [3] * 20}, "3 optimiser steps were skipped"),
        (FALLING, {"rows_read": 100, "rows_kept": 100, "rows_equal": 14}, {}, "In 14\u00a0% of the pairs chosen and"),
        (FALLING, {"rows_read": 200, "rows_kept": 100, "rows_truncated": 30}, {}, "30\u00a0% of the rows were cut"),
        (
            FALLING,
            {"rows_read": 100, "rows_kept": 60, "rows_over_long": 40},
            {},
            "40\u00a0% of the rows were left out as too",
        ),
        (
            FALLING,
            {"rows_read": 100, "rows_kept": 80, "rows_empty": 20},
            {},
            "20\u00a0% of the rows were left out because",
        ),
    ],
)
def test_what_went_wrong_is_said_and_nothing_else(losses, data, columns, words, tmp_path):
    sentences = findings(run_of(losses, tmp_path, data, **columns))
    assert len(sentences) == 1 and words in sentences[0]


def test_a_run_without_model_or_steps_is_called_unfinished(tmp_path):
    run = run_of(FALLING, tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no saved model" in findings(run)[0]
    run.manifest["steps"] = 41
    assert "Step 40 of 41" in findings(run)[0]
    assert findings(RunData(tmp_path)) == ["No optimiser step is recorded yet."]


def test_the_ends_of_a_curve_are_means_of_its_first_and_last_tenth(tmp_path):
    assert run_of([5.0, 3.0] + [1.0] * 16 + [0.2, 0.4], tmp_path).ends("loss") == (4.0, pytest.approx(0.3))
    assert run_of([5.0], tmp_path).ends("loss") == (5.0, 5.0)
    assert RunData(tmp_path).ends("loss") is None
