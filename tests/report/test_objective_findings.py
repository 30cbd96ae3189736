"""What the jobs with rewards are warned about, and what they are not."""

import pytest

from tests.report.test_findings import FALLING, run_of
from trimtab.report.distributions import Accuracy
from trimtab.report.findings import findings

ZERO = [0.0] * 40
GROWING = [step / 20 for step in range(40)]
SHRINKING = [-step / 20 for step in range(40)]
HELD_OUT = {"evaluation": {"rows_kept": 100}}


@pytest.mark.parametrize(
    ("job", "data", "columns"),
    [
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
    assert findings(run_of(FALLING, tmp_path, data, job, **columns)) == []


@pytest.mark.parametrize(
    ("job", "data", "columns", "words"),
    [
        ("rm", HELD_OUT, {"eval_accuracy": [0.55]}, "on 100 held-out pairs is 55\u00a0%, with a 95 % interval from"),
        ("dpo", HELD_OUT, {"eval_accuracy": [0.2]}, "below chance: are the columns of chosen and rejected"),
        ("rm", {}, {"accuracy": [0.5] * 40, "samples": [32] * 40}, "on 128 pairs of the last steps is 50\u00a0%"),
        (
            "dpo",
            {},
            {"chosen_reward": SHRINKING, "rejected_reward": [2 * s for s in SHRINKING]},
            "Both rewards fell, that of the chosen answers by 1.8",
        ),
        (
            "kto",
            {},
            {"chosen_reward": SHRINKING, "rejected_reward": [2 * s for s in SHRINKING]},
            "Both rewards fell, that of the desirable answers",
        ),
        ("kto", {}, {"reward_margin": SHRINKING}, "nothing was learnt from the labels"),
        (
            "kto",
            {},
            {"kl": ZERO, "chosen_reward": ZERO},
            "KL estimate was 0 on 100\u00a0% of the later steps: the model",
        ),
        ("kto", {}, {"kl": ZERO, "chosen_reward": GROWING}, "later steps: mismatched answers became less likely"),
        ("prm", {"labels": {"+": 80, "-": 20}}, {"eval_accuracy": [0.8]}, "giving every step the label '+'"),
    ],
)
def test_what_a_job_got_wrong_is_said_and_nothing_else(job, data, columns, words, tmp_path):
    sentences = findings(run_of(FALLING, tmp_path, data, job, **columns))
    assert len(sentences) == 1 and words in sentences[0]


def test_few_steps_and_few_pairs_are_no_evidence(tmp_path):
    columns = {"chosen_reward": SHRINKING, "rejected_reward": [2 * s for s in SHRINKING], "eval_accuracy": [0.5]}
    assert findings(run_of(FALLING[:10], tmp_path, {"evaluation": {"rows_kept": 10}}, "dpo", **columns)) == []


def test_stored_rewards_are_the_best_evidence_and_flat_ones_are_told(tmp_path):
    run = run_of(FALLING, tmp_path, HELD_OUT, "rm", eval_accuracy=[0.5])
    run.rewards = {"std": 1.0, "source": "evaluation", "chosen_rejected": [[1.0, 0.0]] * 90 + [[0.0, 1.0]] * 10}
    assert findings(run) == []
    run.rewards["std"] = 0.001
    assert ["The rewards hardly differ" in sentence for sentence in findings(run)] == [True]


def test_an_interval_is_in_the_words_of_an_accuracy():
    assert Accuracy(257, 300).in_words().replace("\u00a0", " ") == "85.7 % (95 % interval 81.2 % to 89.2 %)"
