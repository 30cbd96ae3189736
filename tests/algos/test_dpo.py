"""DPO and its relatives: losses and gradients against formulas written out, and against TRL where it means the same.

Where TRL means something else, so that only the formulas can be compared:
- its IPO divides each answer's log-ratio by the answer's length, which is our ipo_mean; ipo is the documents' sum;
- its ORPO takes the NLL over the prompt too; ours over the answer;
- its sigmoid loss has no label smoothing. Its `aot` loss has, and of a single pair it is cDPO.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.algos.one_step import (
    STEP,
    answer_log_probs,
    assert_same_function,
    assert_same_step,
    assert_values_and_slopes,
    causal_lm,
    chat_ids,
    rows_of,
    step_of,
    trl_arguments,
    trl_step,
)
from tests.train.job_run import make_run, preference_rows, step_gradient, write_model, write_rows
from trimtab.algos.supervised_losses import dpo_loss, ipo_loss, log_odds_ratio
from trimtab.config.jobs import DPOOptions
from trimtab.train.supervised_tasks import DPOTask

H = [-7.5, -0.3, 0.0, 0.2, 4.0]
ONE_PAIR = {"label_smoothing": 0.2, "per_device_train_batch_size": 1}
MEANS = [(-0.4, -2.3), (-3.0, -0.01), (-0.05, -0.06), (-8.0, -9.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    write_model(folder / "model")
    write_model(folder / "reference", seed=1)
    write_rows(folder / "train.jsonl", preference_rows(8))
    return folder


def ours(folder, words):
    reference = "" if "orpo" in words or "simpo" in words else f"--ref_pretrain {folder}/reference"
    return step_gradient(make_run(DPOOptions, DPOTask, folder, f"{STEP} --apply_chat_template {reference} {words}"))


# ---- the functions


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing, margin", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.7)])
def test_dpo_cdpo_and_simpo_equal_their_closed_forms(smoothing, margin):
    beta = 0.6
    values, slopes = [], []
    for h in H:
        right, wrong = sigmoid(beta * h - margin), sigmoid(margin - beta * h)
        values.append(-(1 - smoothing) * math.log(right) - smoothing * math.log(wrong))
        slopes.append(beta * (smoothing * right - (1 - smoothing) * wrong))
    assert_values_and_slopes(lambda h: dpo_loss(h, beta, smoothing, margin), H, values, slopes)


def test_ipo_equals_its_closed_form():
    beta = 0.4
    values, slopes = [(h - 1.25) ** 2 for h in H], [2 * (h - 1.25) for h in H]
    assert_values_and_slopes(lambda h: ipo_loss(h, beta), H, values, slopes)


def test_the_log_odds_ratio_equals_its_closed_form():
    values = [math.log(math.exp(c) / (1 - math.exp(c))) - math.log(math.exp(r) / (1 - math.exp(r))) for c, r in MEANS]
    slopes = [[1 / (1 - math.exp(c)), -1 / (1 - math.exp(r))] for c, r in MEANS]
    assert_values_and_slopes(lambda x: log_odds_ratio(x[:, 0], x[:, 1]), MEANS, values, slopes)


def test_losses_and_their_gradients_stay_finite_far_out():
    h = torch.tensor([-1e4, 1e4], requires_grad=True)
    (dpo_loss(h, 1.0, 0.1).sum() + ipo_loss(h, 1.0).sum()).backward()
    assert h.grad.isfinite().all()
    # Certain (log-prob zero) and impossible answers.
    means = torch.tensor([[0.0, -1e4], [-1e4, 0.0], [-1e-9, -1e-3]], requires_grad=True)
    odds = log_odds_ratio(means[:, 0], means[:, 1])
    odds.sum().backward()
    assert odds.isfinite().all() and means.grad.isfinite().all()
    assert odds[0] > 0 > odds[1]


@pytest.mark.parametrize("kind, margin", [("sigmoid", 0.0), ("simpo", 0.7), ("ipo", 0.0)])
def test_functions_equal_trls_cpo_loss(kind, margin):
    from trl.experimental.cpo import CPOTrainer

    smoothing = 0.0 if kind == "ipo" else 0.15
    settings = {"alpha": 0.0, "loss_type": kind, "simpo_gamma": margin, "beta": 0.6, "label_smoothing": smoothing}
    trainer = SimpleNamespace(**settings, accelerator=SimpleNamespace(device="cpu"))

    def ours(pairs):
        h = pairs[:, 0] - pairs[:, 1]
        return ipo_loss(h, 0.6) if kind == "ipo" else dpo_loss(h, 0.6, smoothing, margin)

    assert_same_function(ours, lambda pairs: CPOTrainer.cpo_loss(trainer, *pairs.unbind(1))[0], MEANS)


def test_the_odds_ratio_term_equals_trls():
    from trl.experimental.orpo import ORPOTrainer

    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    assert_same_function(
        lambda pairs: 0.3 * dpo_loss(log_odds_ratio(*pairs.unbind(1)), beta=1.0),
        lambda pairs: -ORPOTrainer.odds_ratio_loss(trainer, *pairs.unbind(1))[0],
        MEANS,
    )


# ---- a training step


@pytest.fixture(scope="module")
def plain(folder):
    """The policy, and for every pair the log-probs of its answers' tokens: the policy's chosen and rejected, and the
    reference's."""
    model, reference = causal_lm(folder / "model"), causal_lm(folder / "reference")
    pairs = []
    for row in rows_of(folder):
        sides = [chat_ids(row, name) for name in ("chosen", "rejected")]
        with torch.no_grad():
            frozen = [answer_log_probs(reference, *side) for side in sides]
        pairs.append([answer_log_probs(model, *side) for side in sides] + frozen)
    return model, pairs


def plain_step(plain, pair_loss, nll_weight=0.0):
    model, pairs = plain
    loss = sum(pair_loss(*pair) for pair in pairs) / len(pairs)
    chosen_tokens = torch.cat([chosen for chosen, *_ in pairs])
    return step_of(model, loss + nll_weight * -chosen_tokens.sum() / len(chosen_tokens))


def plain_h(c, r, ref_c, ref_r):
    return (c.sum() - r.sum()) - (ref_c.sum() - ref_r.sum())


def plain_dpo(*log_probs):
    return -torch.log(1 / (1 + torch.exp(-0.1 * plain_h(*log_probs))))


def plain_cdpo(*log_probs):
    right = 1 / (1 + torch.exp(-0.3 * plain_h(*log_probs)))
    return -0.8 * torch.log(right) - 0.2 * torch.log(1 - right)


def plain_ipo(*log_probs):
    return (plain_h(*log_probs) - 1 / (2 * 0.2)) ** 2


def plain_simpo(c, r, *_):
    return -torch.log(1 / (1 + torch.exp(-(2.0 * (c.mean() - r.mean()) - 0.6))))


def plain_orpo(c, r, *_):
    odds = [torch.exp(side.mean()) / (1 - torch.exp(side.mean())) for side in (c, r)]
    return -0.25 * torch.log(1 / (1 + odds[1] / odds[0]))


CASES = {
    "dpo": ("", plain_dpo, 0.0),
    "cdpo": ("--beta 0.3 --label_smoothing 0.2", plain_cdpo, 0.0),
    "ipo": ("--ipo --beta 0.2", plain_ipo, 0.0),
    "nll": ("--nll_loss_coef 0.3", plain_dpo, 0.3),
    "simpo": ("--preference_loss simpo --beta 2 --simpo_gamma 0.6", plain_simpo, 0.0),
    "orpo": ("--preference_loss orpo --beta 0.25", plain_orpo, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_formula_over_its_pairs(folder, plain, name):
    words, pair_loss, nll_weight = CASES[name]
    assert_same_step(ours(folder, words), plain_step(plain, pair_loss, nll_weight))


def test_reference_log_probs_from_disk_are_those_of_the_reference(folder, plain, monkeypatch):
    expected = plain_step(plain, plain_dpo)
    assert_same_step(ours(folder, "--precompute_ref_log_probs"), expected)
    monkeypatch.setattr("trimtab.train.supervised_tasks.sequence_log_probs", None)  # now they can only be read
    assert_same_step(ours(folder, "--precompute_ref_log_probs"), expected)


def test_with_lora_the_reference_is_the_model_without_its_adapters(folder):
    words = f"{STEP} --apply_chat_template --lora_rank 4"
    run = make_run(DPOOptions, DPOTask, folder, words)
    assert run.task.scorers["reference"].model is run.model, "no second copy"
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    policy = copy.deepcopy(run.model.model).merge_and_unload()
    policy.set_attn_implementation("eager")
    base, losses = causal_lm(folder / "model"), []
    with torch.no_grad():
        for row in rows_of(folder):
            sides = [chat_ids(row, name) for name in ("chosen", "rejected")]
            losses.append(plain_dpo(*(answer_log_probs(m, *side) for m in (policy, base) for side in sides)))
    _, row = step_gradient(run)
    assert row["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)
    assert abs(row["loss"] - math.log(2)) > 0.01, "the adapters count"


@pytest.mark.parametrize("words", ["", "--lora_rank 4"])
def test_a_model_with_dropout_starts_at_log_2(folder, words):
    write_model(folder / "dropping" / "model", attention_dropout=0.3)
    write_rows(folder / "dropping" / "train.jsonl", preference_rows(8))

    def first_loss(more):
        return step_gradient(make_run(DPOOptions, DPOTask, folder / "dropping", f"{STEP} {words} {more}"))[1]["loss"]

    assert first_loss("") == pytest.approx(math.log(2), abs=1e-6)
    assert abs(first_loss("--keep_dropout") - math.log(2)) > 1e-4


def of_trl(folder, trainer, arguments, names=("model",)):
    rows = [{k: v for k, v in row.items() if k != "margin"} for row in rows_of(folder)]
    return trl_step(trainer, [causal_lm(folder / name) for name in names], arguments, rows)


@pytest.mark.parametrize(
    "words, settings",
    [
        ("--beta 0.5", {"beta": 0.5}),
        ("--nll_loss_coef 0.3", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
        ("--preference_loss ipo_mean --beta 0.2", {"loss_type": ["ipo"], "beta": 0.2}),
        # Of one pair, TRL's `aot` is cDPO: there is nothing to sort.
        ("--beta 0.3 --label_smoothing 0.2", {"loss_type": ["aot"], **ONE_PAIR, "beta": 0.3}),
    ],
)
def test_a_step_equals_trls_dpo_trainer(folder, words, settings):
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**trl_arguments(folder) | settings)
    assert_same_step(ours(folder, words), of_trl(folder, DPOTrainer, arguments, ("model", "reference")))


def test_a_simpo_step_equals_trls_cpo_trainer(folder):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    arguments = CPOConfig(
        **trl_arguments(folder) | {"max_length": 64}, loss_type="simpo", beta=2.0, simpo_gamma=0.6, cpo_alpha=0.0
    )
    assert_same_step(ours(folder, CASES["simpo"][0]), of_trl(folder, CPOTrainer, arguments))


def test_the_odds_ratio_term_of_an_orpo_step_equals_trls_trainer(folder):
    """TRL's own log-probs and odds; the NLL, which TRL takes over the prompt too, is added by hand."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class WithAnswerNLL(ORPOTrainer):
        def compute_loss(self, model, inputs):
            chosen, rejected, chosen_logits, *_ = self.concatenated_forward(model, inputs)
            labels = inputs["chosen_labels"][:, 1:]
            logits = chosen_logits[:, : labels.shape[1]]
            nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            return nll - self.odds_ratio_loss(chosen, rejected)[0].mean()

    arguments = ORPOConfig(**trl_arguments(folder) | {"max_length": 64}, beta=0.25)
    assert_same_step(ours(folder, CASES["orpo"][0]), of_trl(folder, WithAnswerNLL, arguments))
