"""A Learner's numbers, against other ways to get them."""

import copy
import math

import numpy as np
import pytest
import torch

from tests.api.learners import PROMPTS, assert_same, copied, judged, learner, weights
from tests.tiny import tiny_model
from trimtab.api.learner import Learner
from trimtab.api.samples import Sample
from trimtab.embedded import bad_word_task

VARIANTS = {"fp32": {}, "lora": {"lora_rank": 4}, "bf16": {"bf16": True}, "bf16 lora": {"bf16": True, "lora_rank": 4}}


def by_hand(model, sample) -> torch.Tensor:
    """Log-probs of the trained tokens by Hugging Face's own forward pass."""
    ids = torch.tensor(sample.ids)
    logits = model(input_ids=ids[None]).logits[0, :-1].float() / sample.temperature
    found = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return found[torch.from_numpy(sample.trained)[1:]]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_what_was_sampled_has_the_log_probs_that_are_trained_after_every_step(options):
    one = learner(**options)
    close = 1e-5 if not options.get("bf16") else 0.2
    for step in range(3):
        samples = judged(one, temperature=0.7)
        for sample, found in zip(samples, one.log_probs(samples)):
            np.testing.assert_allclose(found, sample.log_probs, rtol=0, atol=close)
            assert set(sample.versions.tolist()) == {step} == {one.version}
        figures = one.forward_backward(samples, "ppo")
        assert figures["log_prob_gap"] < close and figures["clip_fraction"] == 0
        assert one.optim_step()["applied"]


def test_log_probs_are_those_of_hugging_faces_own_pass():
    model = tiny_model()
    one = Learner(copy.deepcopy(model), bf16=False)
    samples = one.sample(PROMPTS, 2, max_new_tokens=5, temperature=1.3)
    for sample, found in zip(samples, one.log_probs(samples)):
        np.testing.assert_allclose(found, by_hand(model, sample).detach(), rtol=0, atol=1e-5)


def test_gradients_of_ones_own_loss_are_those_of_autograd_by_hand():
    model = tiny_model()
    one = Learner(copy.deepcopy(model), bf16=False)
    samples = judged(one)
    for sample, weight in zip(samples, np.linspace(0.5, 2, len(samples))):
        sample.weights = weight

    def loss(inputs, power):
        squares_S = inputs.sums(inputs.weights_N * inputs.advantages_N * inputs.log_probs_N) ** power
        return squares_S.sum(), {"squares": squares_S.detach().sum()}

    figures = one.forward_backward(samples, loss, power=2)
    expected = sum(
        (sample.weights * torch.from_numpy(sample.advantages) * by_hand(model, sample)).sum() ** 2 for sample in samples
    )
    expected.backward()
    found = one._optimizer.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)
    tokens = sum(len(sample.log_probs) for sample in samples)
    assert figures["tokens"] == tokens and figures["answers"] == len(samples)
    assert figures["loss"] == pytest.approx(float(expected) / tokens, rel=1e-5) == figures["squares"]


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"pass_tokens": 8}], ids=str)
def test_data_in_several_calls_or_passes_are_one_step(options):
    first, second = learner(**{} if "pass_tokens" in options else options), learner(**options)
    samples = judged(first)
    first.forward_backward(samples, "ppo", kl_coef=0.0)
    for part in (samples[:5], samples[5:6], samples[6:]):
        second.forward_backward(copied(part), "ppo")
    reports = first.optim_step(), second.optim_step()
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-5)
    assert_same(weights(first), weights(second), rtol=1e-3, atol=2e-6)


def test_sums_are_divided_by_what_was_asked_for():
    norms = {}
    for per in ("tokens", "answers", 7.0):
        one = learner(max_norm=0.0)
        samples = judged(one)
        one.forward_backward(samples, "reinforce")
        norms[per] = one.optim_step(per=per)["grad_norm"]
    tokens = sum(len(sample.log_probs) for sample in samples)
    assert norms["tokens"] * tokens == pytest.approx(norms["answers"] * len(samples), rel=1e-5)
    assert norms["tokens"] * tokens == pytest.approx(norms[7.0] * 7, rel=1e-5)


def test_the_reference_is_the_model_before_anything_was_learnt(tmp_path):
    bad_word_task.write(tmp_path)
    for made in (
        learner(),
        learner(lora_rank=4),
        Learner(tmp_path / "model", bf16=False, learning_rate=1e-2),
        Learner(tmp_path / "model", bf16=False, learning_rate=1e-2, lora_rank=4),
    ):
        samples = judged(made)
        before = made.log_probs(samples)
        made.forward_backward(samples, "reinforce")
        made.optim_step()
        after, reference = made.log_probs(samples), made.log_probs(samples, reference=True)
        for one, three in zip(before, reference):
            np.testing.assert_allclose(three, one, rtol=0, atol=1e-5)
        assert max(abs(one - two).max() for one, two in zip(before, after)) > 1e-3


def test_a_kl_to_the_reference_pulls_back_to_it():
    one = learner(learning_rate=3e-3)
    samples = judged(one)
    one.forward_backward(samples, "reinforce")
    one.optim_step()
    for sample, found in zip(samples, one.log_probs(samples, reference=True)):
        sample.reference, sample.advantages = found, 0.0
    kl = []
    for _ in range(6):
        kl.append(one.forward_backward(samples, "policy_gradient", kl_coef=1.0)["kl"])
        one.optim_step(learning_rate=1e-3)
    assert kl[0] > 1e-3 and kl[-1] < kl[0] / 2


def test_supervised_samples_become_likelier(tmp_path):
    bad_word_task.write(tmp_path)
    one = Learner(tmp_path / "model", bf16=False, learning_rate=1e-2)
    sample = one.demonstration(("word7", " word3 word5"))
    assert sample.text.split() == ["word3", "word5"] and sample.trained_ids[-1] == one.tokenizer.eos_token_id
    losses = []
    for _ in range(5):
        losses.append(one.forward_backward([sample], "sft")["loss"])
        one.optim_step()
    before = float(one.log_probs([sample], reference=True)[0].mean())
    assert losses[0] == pytest.approx(-before, rel=1e-5) and losses[-1] < losses[0] - 1


def test_preferences_are_learnt_pair_by_pair_however_passes_are_cut():
    margins = {}
    for tokens in (None, 12):
        one = learner(pass_tokens=tokens, learning_rate=3e-3)
        samples = one.sample(PROMPTS, 2, max_new_tokens=5)
        for sample, found in zip(samples, one.log_probs(samples, reference=True)):
            sample.reference = found
        margins[tokens] = []
        for _ in range(4):
            figures = one.forward_backward(samples, "dpo", beta=0.5)
            margins[tokens].append(figures["margin"])
            assert figures["accuracy"] in {0, 1 / 3, 2 / 3, 1}
            one.optim_step(per=3)
    np.testing.assert_allclose(margins[None], margins[12], atol=1e-3)
    assert abs(margins[None][0]) < 1e-4 and margins[None][-1] > 0.1


def test_a_loss_that_is_not_finite_moves_nothing():
    one = learner()
    samples, before = judged(one), weights(one)
    one.forward_backward(samples, lambda inputs: (inputs.log_probs_N.sum() * math.inf, {}))
    assert one.optim_step()["applied"] is False and one.version == 0
    assert_same(before, weights(one))
    one.forward_backward(samples)
    assert one.optim_step()["applied"] is True and one.version == 1


def test_calls_draw_anew_and_seeds_draw_again():
    one = learner()
    first, second = (one.sample(PROMPTS, 2) for _ in range(2))
    assert [s.ids for s in first] != [s.ids for s in second]
    again = [one.sample(PROMPTS, 2, seeds=[3, 4, 5]) for _ in range(2)]
    assert [s.ids for s in again[0]] == [s.ids for s in again[1]]
    assert [s.ids for s in learner().sample(PROMPTS, 2)] == [s.ids for s in first]


def test_nobody_elses_random_numbers_are_touched():
    model = tiny_model()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    one = Learner(model, bf16=False, lora_rank=4, lora_dropout=0.5)
    one.forward_backward(judged(one))
    one.optim_step()
    assert torch.equal(torch.rand(4), expected)


def test_an_answer_ends_where_the_context_does():
    one = learner()
    (sample,) = one.sample([[5] * 250], max_new_tokens=100, stop_token_ids=[])
    assert len(sample.ids) == 256 and sample.finish == "length"


def test_a_pass_that_does_not_fit_is_made_smaller(monkeypatch):
    whole, small = learner(), learner()
    samples = judged(whole)
    whole.forward_backward(samples)
    forward = type(small._policy).forward

    def short_of_memory(self, batch, **how):
        if batch.tokens > 40:
            raise torch.OutOfMemoryError("no room")
        return forward(self, batch, **how)

    monkeypatch.setattr(type(small._policy), "forward", short_of_memory)
    small.forward_backward(copied(samples))
    whole.optim_step(), small.optim_step()
    assert_same(weights(whole), weights(small), rtol=1e-3, atol=2e-6)


def test_a_sample_shows_itself_in_a_line():
    sample = Sample([1, 2, 3], np.array([False, False, True]), reward=0.5, text="x" * 100)
    assert repr(sample) == f"Sample('{'x' * 37}...', 3 tokens, 1 trained, finish='stop', reward=0.5)"
    assert "version=0" in repr(learner())
