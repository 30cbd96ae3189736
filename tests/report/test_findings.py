"""Each sentence appears when its condition holds, and a healthy run has none."""

from pathlib import Path

import pytest

from trimtab.report.distributions import Accuracy
from trimtab.report.findings import findings
from trimtab.report.formatting import spans, sparkline
from trimtab.report.run_data import RunData
from trimtab.report.summary import Success, success_of, summary

FALLING = [3.0 - step / 20 for step in range(40)]
ZERO = [0.0] * 40
GROWING = [step / 20 for step in range(40)]
SHRINKING = [-step / 20 for step in range(40)]
HELD_OUT = {"evaluation": {"rows_kept": 100}}
BOTH_FALL = {"chosen_reward": SHRINKING, "rejected_reward": [2 * s for s in SHRINKING]}


def run_of(folder: Path, job: str = "sft", data: dict | None = None, first: int = 1, **columns: list) -> RunData:
    """A run whose rows, from step `first` on, have these columns where they are not None."""
    (folder / "config.json").write_text("{}")
    rows = [{"step": first + place} for place in range(max(map(len, columns.values())))]
    for name, values in columns.items():
        for row, value in zip(rows, values):
            if value is not None:
                row[name] = value
    return RunData(folder, rows=rows, manifest={"data": data or {}}, job=job)


def rl_run_of(folder: Path, **columns: list) -> RunData:
    """One that was evaluated before training, at step 0."""
    return run_of(folder, "grpo", first=0, **columns)


def steady(**figures: float) -> dict[str, list]:
    return {name: [None] + [value] * 30 for name, value in {"tokens": 100, **figures}.items()}


@pytest.mark.parametrize(
    ("job", "data", "columns"),
    [
        (
            *("sft", {"rows_read": 100, "rows_kept": 95, "rows_truncated": 5, "rows_over_long": 5}),
            {"grad_norm": [1.0] * 40, "skipped_steps": [0] * 40, "eval_loss": [3, 2, 1]},
        ),
        ("rm", HELD_OUT, {"eval_accuracy": [0.8]}),
        ("dpo", HELD_OUT, {"eval_accuracy": [0.8], "chosen_reward": GROWING, "rejected_reward": SHRINKING}),
        ("dpo", HELD_OUT, {"eval_accuracy": [0.8], "chosen_reward": GROWING, "rejected_reward": ZERO}),
        # Half of these pairs are equal, which no model could tell apart.
        ("dpo", {"evaluation": {"rows_kept": 100, "rows_equal": 50}}, {"eval_accuracy": [0.45]}),
        # The chosen side falls a little while the margin grows a lot.
        (
            "dpo",
            HELD_OUT,
            {"eval_accuracy": [0.8], "chosen_reward": [s / 40 for s in SHRINKING], "rejected_reward": SHRINKING},
        ),
        ("kto", {}, {"kl": [0.0, 1.0] * 20, "chosen_reward": GROWING, "reward_margin": GROWING}),
        ("prm", {"labels": {"+": 60, "-": 40}}, {"eval_accuracy": [0.8]}),
        ("sft", {}, {"kl": ZERO, "accuracy": ZERO}),
    ],
)
def test_what_goes_well_is_not_warned_about(job, data, columns, tmp_path):
    assert findings(run_of(tmp_path, job, data, loss=FALLING, **columns)) == []


@pytest.mark.parametrize(
    ("job", "data", "columns", "words"),
    [
        ("sft", {}, {"loss": [2.0] * 40}, "The loss hardly moved"),
        (
            *(
                "sft",
                {},
                {"alarms": [[]] * 38 + [["the loss began at 2 and is 7.1e+3"], ["the loss began at 2 and is 9"]]},
            ),
            "The loss began at 2 and is 9 (steps 39, 40, 2 of 40; the figures are those of 40).",
        ),
        ("sft", {}, {"skipped_steps": [0] * 20 + [1] * 20}, "1 optimiser step was skipped"),
        ("sft", {}, {"skipped_steps": [0] * 20 + [3] * 20}, "3 optimiser steps were skipped"),
        *(
            ("sft", {"rows_read": read, "rows_kept": kept, **odd}, {}, words)
            for read, kept, odd, words in (
                (100, 100, {"rows_equal": 14}, "In 14\u00a0% of the pairs chosen and"),
                (200, 100, {"rows_truncated": 30}, "30\u00a0% of the rows were cut"),
                (100, 60, {"rows_over_long": 40}, "40\u00a0% of the rows were left out as too"),
                (100, 80, {"rows_empty": 20}, "20\u00a0% of the rows were left out because"),
            )
        ),
        ("rm", HELD_OUT, {"eval_accuracy": [0.55]}, "on 100 held-out pairs is 55\u00a0%, with a 95 % interval from"),
        ("dpo", HELD_OUT, {"eval_accuracy": [0.2]}, "below chance: are the columns of chosen and rejected"),
        ("rm", {}, {"accuracy": [0.5] * 40, "samples": [32] * 40}, "on 128 pairs of the last steps is 50\u00a0%"),
        ("dpo", {}, BOTH_FALL, "Both rewards fell, that of the chosen answers by 1.8"),
        ("kto", {}, BOTH_FALL, "Both rewards fell, that of the desirable answers"),
        ("kto", {}, {"reward_margin": SHRINKING}, "nothing was learnt from the labels"),
        (
            *("kto", {}, {"kl": ZERO, "chosen_reward": ZERO}),
            "KL estimate was 0 on 100\u00a0% of the later steps: the model",
        ),
        ("kto", {}, {"kl": ZERO, "chosen_reward": GROWING}, "later steps: mismatched answers became less likely"),
        ("prm", {"labels": {"+": 80, "-": 20}}, {"eval_accuracy": [0.8]}, "giving every step the label '+'"),
    ],
)
def test_what_went_wrong_is_said_and_nothing_else(job, data, columns, words, tmp_path):
    (told,) = findings(run_of(tmp_path, job, data, **{"loss": FALLING, **columns}))
    assert words in told


@pytest.mark.parametrize(
    "columns",
    [
        {"eval_pass_1": [0.3, 0.9], "reward": [0.5] * 40},
        # The loss of a policy means nothing by itself.
        {"loss": [float(step) for step in range(40)]},
        {"eval_pass_1": [0.3, 0.92, 0.9], "alarms": [[], [], None]},
        {"reward": [0.5 + (-1) ** step * 0.2 for step in range(40)]},
        {"eval_pass_1": [1.0, 1.0]},
        steady(age_max=3, waiting=0.3, read_again=20),
        *({"alarms": [None, odd]} for odd in ("text", 3, [None, 3, "", {}], {"a": 1})),
    ],
)
def test_an_rl_run_that_goes_well_is_not_warned_about(columns, tmp_path):
    assert findings(rl_run_of(tmp_path, **columns)) == []


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"reward": [1.0 - step / 80 for step in range(40)]}, "The mean reward fell from 0.981 to 0.531."),
        ({"eval_pass_1": [0.3] + [None] * 20 + [0.3]}, "Held-out score did not rise: 0.3 before training, 0.3 at the"),
        (steady(age_max=0, waiting=0.1), "without --async_train the run would have learnt from answers as new"),
        (steady(age_max=2, waiting=0.7), "the trainer had nothing to do for 70\u00a0% of the time"),
        (steady(age_max=2, waiting=0.1, read_again=75), "For every token that was trained 0.75 were read again"),
    ],
)
def test_what_goes_badly_in_an_rl_run_is_said(columns, words, tmp_path):
    (told,) = findings(rl_run_of(tmp_path, **columns))
    assert words in told


def test_a_run_without_model_or_steps_is_called_unfinished(tmp_path):
    run = run_of(tmp_path, loss=FALLING)
    (tmp_path / "config.json").unlink()
    assert "no saved model" in findings(run)[0]
    run.manifest["steps"] = 41
    assert "Step 40 of 41" in findings(run)[0]
    assert findings(RunData(tmp_path)) == ["No optimiser step is recorded yet."]


def test_the_ends_of_a_curve_are_means_of_its_first_and_last_tenth(tmp_path):
    assert run_of(tmp_path, loss=[5.0, 3.0] + [1.0] * 16 + [0.2, 0.4]).ends("loss") == (4.0, pytest.approx(0.3))
    assert run_of(tmp_path, loss=[5.0]).ends("loss") == (5.0, 5.0)
    assert RunData(tmp_path).ends("loss") is None


def test_few_steps_and_few_pairs_are_no_evidence(tmp_path):
    data = {"evaluation": {"rows_kept": 10}}
    short = {name: values[:10] for name, values in BOTH_FALL.items()}
    assert findings(run_of(tmp_path, "dpo", data, loss=FALLING[:10], **short, eval_accuracy=[0.5])) == []


def test_stored_rewards_are_the_best_evidence_and_flat_ones_are_told(tmp_path):
    run = run_of(tmp_path, "rm", HELD_OUT, loss=FALLING, eval_accuracy=[0.5])
    run.rewards = {"std": 1.0, "source": "evaluation", "chosen_rejected": [[1.0, 0.0]] * 90 + [[0.0, 1.0]] * 10}
    assert findings(run) == []
    run.rewards["std"] = 0.001
    assert ["The rewards hardly differ" in sentence for sentence in findings(run)] == [True]


def test_an_interval_is_in_the_words_of_an_accuracy():
    assert Accuracy(257, 300).in_words().replace("\u00a0", " ") == "85.7 % (95 % interval 81.2 % to 89.2 %)"


def test_an_alarm_is_said_once_with_the_iterations_it_held_in(tmp_path):
    kl = "KL to the reference is {:.2f} nats a token: raise --init_kl_coef"
    alarms = [None, ["all rewards are equal"], [kl.format(1.1)], [kl.format(1.3)], [kl.format(2)], [], [kl.format(1.7)]]
    assert findings(rl_run_of(tmp_path, alarms=alarms)) == [
        "All rewards are equal (iteration 1, 1 of 6).",
        "KL to the reference is 1.70 nats a token: raise --init_kl_coef "
        "(iterations 2 to 4 and 6, 4 of 6; the figures are those of 6).",
    ]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([4], "4"),
        ([1, 2], "1, 2"),
        ([1, 2, 3, 7], "1 to 3 and 7"),
        ([1, 3, 5], "1, 3 and 5"),
        ([1, 3, 5, 7, 9, 11, 12], "1, 3, 5, 7 and 3 more"),
    ],
)
def test_spans_of_numbers_in_words(numbers, words):
    assert spans(numbers) == words


def test_success_is_one_line_of_text():
    assert sparkline([0, 0.5, 1, 2, -1], 0, 1) == "▁▅██▁"
    assert Success([(0, 0.27), (20, 0.6), (40, 0.94)]).picture() == "27\u00a0% ▃▅█ 94\u00a0%"
    assert Success([(0, -2.0), (40, 6.0)], is_share=False).picture() == "-2 ▁█ 6"
    assert Success([(0, 2.0), (40, 2.0)], is_share=False).picture() == "2 … 2"


def test_a_summary_says_only_what_is_known(tmp_path):
    assert summary(rl_run_of(tmp_path, loss=[None, 1.0])) == "Training went on in 1 iteration."
    assert success_of(rl_run_of(tmp_path, reward=[1.0])) is None
    told = summary(rl_run_of(tmp_path, reward=[None, 1.0, 0.5], seconds=[None, 2.0, 4.0], kl=[None, 0.0, 0.25]))
    assert told == (
        "The mean reward fell from 1 to 0.5 in 2 iterations and 6.0 s (3.0 s a typical iteration). "
        "At the end the policy is 0.25 nats a token from its reference."
    )
