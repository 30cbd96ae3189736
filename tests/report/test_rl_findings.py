"""What an RL run is warned about, and what it is not; and its success as one line of text."""

import pytest

from trimtab.report.findings import findings
from trimtab.report.formatting import spans, sparkline
from trimtab.report.run_data import RunData
from trimtab.report.summary import Success, success_of, summary

FALLING = [1.0 - step / 80 for step in range(40)]


def run_of(folder, job: str = "grpo", **columns) -> RunData:
    (folder / "config.json").write_text("{}")
    rows = [{"step": step} for step in range(max(map(len, columns.values())))]
    for name, values in columns.items():
        for row, value in zip(rows, values):
            if value is not None:
                row[name] = value
    return RunData(folder, rows=rows, job=job)


@pytest.mark.parametrize(
    "columns",
    [
        {"eval_pass_1": [0.3, 0.9], "reward": [0.5] * 40},
        # The loss of a policy means nothing by itself.
        {"loss": [float(step) for step in range(40)]},
        {"eval_pass_1": [0.3, 0.92, 0.9], "alarms": [[], [], None]},
        {"reward": [0.5 + (-1) ** step * 0.2 for step in range(40)]},
        {"eval_pass_1": [1.0, 1.0]},
    ],
)
def test_what_goes_well_is_not_warned_about(columns, tmp_path):
    assert findings(run_of(tmp_path, **columns)) == []


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"reward": FALLING}, "The mean reward fell from 0.981 to 0.531."),
        ({"eval_pass_1": [0.3] + [None] * 20 + [0.3]}, "Held-out score did not rise: 0.3 before training, 0.3 at the"),
    ],
)
def test_what_goes_badly_is_said(columns, words, tmp_path):
    (told,) = findings(run_of(tmp_path, **columns))
    assert words in told


def test_an_alarm_is_said_once_with_the_iterations_it_held_in(tmp_path):
    kl = "KL to the reference is {:.2f} nats a token: raise --init_kl_coef"
    alarms = [None, ["all rewards are equal"], [kl.format(1.1)], [kl.format(1.3)], [kl.format(2)], [], [kl.format(1.7)]]
    assert findings(run_of(tmp_path, alarms=alarms)) == [
        "All rewards are equal (iteration 1, 1 of 6).",
        "KL to the reference is 1.70 nats a token: raise --init_kl_coef "
        "(iterations 2 to 4 and 6, 4 of 6; the figures are those of 6).",
    ]


@pytest.mark.parametrize("odd", ["text", 3, [None, 3, "", {}], {"a": 1}])
def test_odd_alarms_are_passed_over(odd, tmp_path):
    assert findings(run_of(tmp_path, alarms=[None, odd])) == []


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
    assert summary(run_of(tmp_path, loss=[None, 1.0])) == "Training went on in 1 iteration."
    assert success_of(run_of(tmp_path, reward=[1.0])) is None
    told = summary(run_of(tmp_path, reward=[None, 1.0, 0.5], seconds=[None, 2.0, 4.0], kl=[None, 0.0, 0.25]))
    assert told == (
        "The mean reward fell from 1 to 0.5 in 2 iterations and 6.0 s (3.0 s a typical iteration). "
        "At the end the policy is 0.25 nats a token from its reference."
    )
