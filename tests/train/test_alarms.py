"""A diverged run of any job is told at its terminal and in its report; a healthy one is told nothing."""

import json
import math
import random

import pytest

from tests.train.jobs import write_job
from trimtab.cli.main import main
from trimtab.train.alarms import MetricAlarms
from trimtab.train.metrics import read_rows

NAN = float("nan")


def seen(*rows: dict) -> list[str]:
    """Every alarm of the rows, each kind once by its first words."""
    watch, found = MetricAlarms(), {}
    for step, row in enumerate(rows, start=1):
        for told in watch.see({"step": step, **row}):
            found.setdefault(" ".join(told.split()[:4]), told)
    return list(found.values())


def losses(values, **more) -> list[dict]:
    return [{"loss": value, "grad_norm": 1.0, **more} for value in values]


def noisy(steps: int, start: float, end: float, noise: float, seed: int) -> list[float]:
    dice = random.Random(seed)
    return [(start + (end - start) * i / steps) * dice.lognormvariate(0, noise) for i in range(steps)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("start", "end", "noise"), [(3.0, 0.2, 0.3), (0.7, 0.7, 0.4), (0.02, 0.02, 1.0)])
def test_a_healthy_run_raises_none(start, end, noise, seed):
    dice = random.Random(seed)
    rows = losses(noisy(200, start, end, noise, seed))
    for row in rows:
        row |= {"grad_norm": dice.lognormvariate(0, 0.5), "accuracy": dice.betavariate(30, 20), "samples": 16}
        row |= {"chosen_reward": dice.gauss(0.2, 1), "rejected_reward": dice.gauss(0, 1)}
    for i, row in enumerate(rows[9::10]):
        row["eval_loss"] = end + (start - end) / (1 + i) + dice.gauss(0, 0.002 * start)
    assert seen(*rows) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (losses([0.08, 3.0, 9.0, 9.9, 9.7, 9.6]), "the loss began at 0.08 and is"),
        (losses([0.7, 4.0, 478_000.0, 12.0, 90_000.0, 3.0, 2.0]), "training makes the model worse"),
        (losses([2.0] * 10 + [3.5 + step / 10 for step in range(30)]), "the loss began at 2 and is"),
        (losses([1.0, NAN, 1.0]), "the loss is not a finite number"),
        (losses([1.0, None, 1.0]), "the loss is not a finite number"),
        (losses([1.0, 1.0], eval_loss=NAN), "the evaluation loss is not a finite number"),
        ([*losses([1.0] * 30), {"loss": 1.0, "grad_norm": 50.0}], "jumped to 50, against 1 on a typical step"),
        ([{"loss": 1.0, "grad_norm": 1.2**step} for step in range(60)], "the gradient norm grew from 1.44 to"),
        (
            losses([0.7] * 60, accuracy=0.3, samples=16, chosen_reward=0.0, rejected_reward=1.0),
            "the accuracy on the last 112 pairs is 30%, below chance",
        ),
        (
            [{"loss": 3.0 - step / 20, "eval_loss": (2.0, 1.0, 1.5)[step // 10]} for step in range(30)],
            "lowest at step 11 (1) and is 1.5, while the training loss goes on falling",
        ),
        (
            [
                {"reward": 0.5, "eval_reward": r, "eval_reward_low": r - 0.1, "eval_reward_high": r + 0.1}
                for r in (1, 0.7)
            ],
            "the evaluation reward was highest at iteration 1 (1) and is 0.7",
        ),
    ],
)
def test_what_goes_wrong_is_told_in_words(rows, told):
    (found,) = seen(*rows)
    assert told in found


def test_a_policy_loss_and_the_ties_of_a_first_step_mean_nothing():
    assert seen(*losses([0.01 * (-2) ** (step % 9) for step in range(60)], reward=0.5)) == []
    ties = {"accuracy": 0.0, "samples": 64, "chosen_reward": 0.0, "rejected_reward": 0.0}
    assert seen(*losses([math.log(2)] * 60, **ties)) == []


def test_an_evaluation_within_the_interval_of_the_best_is_no_fall():
    assert seen(*({"eval_reward": r, "eval_reward_low": r - 0.2, "eval_reward_high": r + 0.2} for r in (1, 0.7))) == []


def train(folder, words: str) -> list[dict]:
    command = f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --max_len 40 --train_batch_size 8"
    assert main([*command.split(), "--save_path", f"{folder}/out", *words.split()]) == 0
    return read_rows(folder / "out" / "metrics.jsonl")


def test_a_diverged_run_says_so_once_while_it_works_and_in_its_report(tmp_path, capsys):
    write_job(tmp_path, "sft", rows=64)
    train(tmp_path, "--learning_rate 3 --max_epochs 2 --lr_scheduler constant --lr_warmup_ratio 0")
    assert " ".join(capsys.readouterr().err.split()).count("training makes the model worse") == 1
    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("training makes the model worse; lower the learning rate (steps") == 1
    assert "Nothing unusual" not in page


def test_a_healthy_run_has_no_alarm_and_a_resumed_one_tells_what_the_whole_one_tells(tmp_path):
    write_job(tmp_path, "sft", rows=64)
    rows = train(tmp_path, "--learning_rate 3e-3 --max_epochs 2")
    assert rows and not any("alarms" in row for row in rows)
    diverged = losses([0.1] + [5.0] * 9)
    whole, resumed = MetricAlarms(), MetricAlarms()
    expected = [whole.see({"step": step, **row}) for step, row in enumerate(diverged, 1)]
    for step, row in enumerate(json.loads(json.dumps(diverged[:6])), 1):
        resumed.see({"step": step, **row})
    assert [resumed.see({"step": step, **row}) for step, row in enumerate(diverged[6:], 7)] == expected[6:]
    assert expected[-1]
