"""The pairwise loss: values and gradients against the formula written out, and against TRL's trainer."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.algos.one_step import (
    STEP,
    assert_same_step,
    assert_values_and_slopes,
    chat_ids,
    rows_of,
    step_of,
    trl_arguments,
    trl_step,
)
from tests.train.job_run import make_run, preference_rows, step_gradient, write_model, write_rows
from trimtab.algos.supervised_losses import pairwise_loss
from trimtab.config.jobs import RMOptions
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.train.supervised_tasks import RMTask

CHOSEN = [1.5, -2.0, 0.0, 40.0, 3.0]
REJECTED = [0.5, 1.0, 0.0, -40.0, 2.9]
MARGINS = [0.0, 0.5, 1.0, 3.0, -0.5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model with a head of its own, wide enough that its scores differ."""
    folder = tmp_path_factory.mktemp("rm")
    write_model(folder / "language_model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "language_model", num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl", preference_rows(8))
    return folder


def ours(folder, words=""):
    return step_gradient(make_run(RMOptions, RMTask, folder, f"{STEP} --apply_chat_template {words}"))


def classifier(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder / "model", attn_implementation="eager").eval()


@pytest.mark.parametrize("margins", [None, MARGINS])
def test_the_loss_equals_its_closed_form(margins):
    values, slopes = [], []
    for c, r, m in zip(CHOSEN, REJECTED, margins or [0.0] * len(CHOSEN)):
        wrong = 1 / (1 + math.exp(c - r - m))
        values.append(math.log1p(math.exp(-(c - r - m))))
        slopes.append([-wrong, wrong])
    margin = None if margins is None else torch.tensor(margins)
    pairs = [*zip(CHOSEN, REJECTED)]
    assert_values_and_slopes(lambda x: pairwise_loss(x[:, 0], x[:, 1], margin), pairs, values, slopes)


def test_a_hopeless_pair_has_a_finite_loss_and_gradient_in_half_precision_too():
    """log(1 + exp(d)) as it is written would overflow here."""
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.tensor([-500.0, 500.0], dtype=dtype, requires_grad=True)
        loss = pairwise_loss(scores[:1], scores[1:])
        loss.sum().backward()
        assert loss.dtype == torch.float32 and loss.item() == 1000
        assert scores.grad.tolist() == [-1, 1]


def scores(model, row):
    return [model(input_ids=chat_ids(row, name)[0][None]).logits[0, 0] for name in ("chosen", "rejected")]


def plain_step(folder, with_margin):
    model, total, rows = classifier(folder), 0.0, rows_of(folder)
    for row in rows:
        chosen, rejected = scores(model, row)
        difference = chosen - rejected - (row["margin"] if with_margin else 0)
        total = total + torch.log(1 + torch.exp(-difference))
    return step_of(model, total / len(rows))


@pytest.mark.parametrize("words", ["", "--loss logexp --margin_loss"])
def test_a_step_equals_the_formula_over_its_pairs(folder, words):
    assert_same_step(ours(folder, words), plain_step(folder, "margin" in words))


@pytest.mark.parametrize("with_margin", [False, True])
def test_a_step_equals_trls_trainer(folder, with_margin):
    from trl import RewardConfig, RewardTrainer

    names = ("prompt", "chosen", "rejected", "margin")[: 4 if with_margin else 3]
    rows = [{name: row[name] for name in names} for row in rows_of(folder)]
    expected = trl_step(RewardTrainer, [classifier(folder)], RewardConfig(**trl_arguments(folder)), rows)
    assert_same_step(ours(folder, "--margin_loss" if with_margin else ""), expected)


def test_figures_describe_the_pairs(folder):
    model, rows = classifier(folder), rows_of(folder)
    with torch.no_grad():
        chosen, rejected = torch.tensor([scores(model, row) for row in rows]).unbind(1)
    _, row = ours(folder)
    assert row["accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert row["chosen_reward"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert row["rejected_reward"] == pytest.approx(rejected.mean().item(), abs=1e-5)


def test_margins_that_are_asked_for_must_be_in_the_data(folder, tmp_path):
    write_rows(tmp_path / "plain.jsonl", [{"chosen": "a>b", "rejected": "a>c"}])
    with pytest.raises(UserError, match=r"--margin_loss: .* no column margin"):
        make_run(RMOptions, RMTask, folder, f"--margin_loss --dataset {tmp_path}/plain.jsonl")
