"""KTO: loss and gradient against the formula written out, and against TRL's trainer.

TRL estimates the KL term from one micro-batch and pairs every prompt with the previous answer; ours takes the whole
step and the next answer. With one batch of all rows, in the opposite order, the two are the same.
"""

import math

import pytest
import torch

from tests.algos.one_step import (
    STEP,
    answer_log_probs,
    assert_same_step,
    assert_values_and_slopes,
    causal_lm,
    chat_ids,
    rows_of,
    step_of,
    trl_arguments,
    trl_step,
)
from tests.train.job_run import labelled_rows, make_run, step_gradient, write_model, write_rows
from trimtab.algos.supervised_losses import kl_baseline, kto_loss
from trimtab.config.jobs import KTOOptions
from trimtab.train.supervised_tasks import KTOTask

RATIOS = [-3.0, -0.2, 0.0, 0.4, 6.0, -900.0, 900.0]
WEIGHTS = "--beta 0.3 --desirable_loss_weight 1.5 --undesirable_loss_weight 0.7"


@pytest.fixture(scope="module", params=[(0, 1)])
def folder(request, tmp_path_factory):
    """Of seeds of the policy and the reference. The KL estimate of these rows is above zero; exchanged, below."""
    folder = tmp_path_factory.mktemp("kto")
    for name, seed in zip(("model", "reference"), request.param):
        write_model(folder / name, seed=seed)
    write_rows(folder / "train.jsonl", labelled_rows(8))
    return folder


def ours(folder, words=WEIGHTS):
    words = f"{STEP} --apply_chat_template --ref_pretrain {folder}/reference {words}"
    return make_run(KTOOptions, KTOTask, folder, words)


@pytest.mark.parametrize("good", [True, False])
def test_the_loss_equals_its_closed_form(good):
    beta, z, weights = 0.7, 0.25, {True: 1.5, False: 0.6}
    values, slopes = [], []
    for ratio in RATIOS:
        gain = beta * (ratio - z if good else z - ratio)
        s = 1 / (1 + math.exp(-gain))
        values.append(weights[good] * (1 - s))
        slopes.append(weights[good] * beta * s * (1 - s) * (-1 if good else 1))
    labels = torch.full((len(RATIOS),), good)
    loss = lambda ratios: kto_loss(ratios, labels, torch.tensor(z), beta, weights[True], weights[False])  # noqa: E731
    assert_values_and_slopes(loss, RATIOS, values, slopes)


def test_the_baseline_is_never_below_zero_and_has_no_gradient():
    mean = torch.tensor(0.5, requires_grad=True)
    assert kl_baseline(mean).item() == 0.5
    assert kl_baseline(-mean).item() == 0
    assert not kl_baseline(mean).requires_grad


def plain_step(folder, order):
    model, reference = causal_lm(folder / "model"), causal_lm(folder / "reference")
    rows = [rows_of(folder)[i] for i in order]
    sequences = [chat_ids(row, "completion") for row in rows]
    mismatched = []
    for i in range(len(rows)):
        ids, begin = sequences[i]
        answer, answer_begin = sequences[(i + 1) % len(rows)]
        mismatched.append((torch.cat([ids[:begin], answer[answer_begin:]]), begin))

    def ratio(sequence):
        with torch.no_grad():
            frozen = answer_log_probs(reference, *sequence).sum()
        return answer_log_probs(model, *sequence).sum() - frozen

    with torch.no_grad():
        kl = sum(ratio(sequence).item() for sequence in mismatched) / len(rows)
    z = max(0.0, kl)
    total = 0.0
    for row, sequence in zip(rows, sequences):
        weight, sign = (1.5, 1) if row["label"] else (0.7, -1)
        total = total + weight * (1 - 1 / (1 + torch.exp(-0.3 * sign * (ratio(sequence) - z))))
    return step_of(model, total / len(rows)), kl


@pytest.mark.parametrize("folder, sign", [((0, 1), 1), ((1, 0), -1)], indirect=["folder"])
def test_a_step_equals_the_formula_over_its_answers(folder, sign):
    run = ours(folder)
    expected, kl = plain_step(folder, run.order.step_samples(0))
    assert sign * kl > 0.1, "both sides of the clamp are tried"
    found = step_gradient(run)
    assert found[1]["kl"] == pytest.approx(max(0.0, kl), abs=1e-5)
    assert_same_step(found, expected)


def test_a_step_equals_trls_trainer(folder):
    from trl import KTOConfig, KTOTrainer

    run = ours(folder)
    arguments = KTOConfig(
        **trl_arguments(folder), beta=0.3, desirable_weight=1.5, undesirable_weight=0.7, loss_type="kto"
    )
    models = causal_lm(folder / "model"), causal_lm(folder / "reference")
    rows = [rows_of(folder)[i] for i in reversed(run.order.step_samples(0))]
    assert_same_step(step_gradient(run), trl_step(KTOTrainer, models, arguments, rows))


def test_an_answer_alone_in_its_step_has_no_kl_estimate(folder):
    """Its only partner would be itself."""
    run = ours(folder, "--train_batch_size 1 --micro_train_batch_size 1")
    assert step_gradient(run)[1]["kl"] == 0


def test_an_evaluation_set_larger_than_a_step_is_paired_step_by_step(folder, tmp_path):
    """Every figure is a mean over all answers, each compared with the KL estimate of its own eight."""
    rows = labelled_rows(16)

    def evaluated(name, rows):
        write_rows(tmp_path / name, rows)
        return ours(folder, f"{WEIGHTS} --eval_dataset {tmp_path}/{name} --eval_split train").evaluate()

    whole = evaluated("whole.jsonl", rows)
    halves = evaluated("first.jsonl", rows[:8]), evaluated("second.jsonl", rows[8:])
    assert halves[0]["eval_kl"] != pytest.approx(halves[1]["eval_kl"])
    for name in ("eval_loss", "eval_kl"):
        assert whole[name] == pytest.approx(sum(half[name] for half in halves) / 2, abs=1e-6)
