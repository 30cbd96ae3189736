"""The first update of every method, from real samples of different lengths, against one written from the formulas.

Policy and proposal start as the same weights, so that Hugging Face's model of them gives every log-prob that is needed.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.job_run import NoStop
from tests.train.tail.small_world import (
    PROMPT,
    assert_close,
    caught_gradients,
    gradients_of,
    make_run,
    reward_of,
    token_log_probs,
    write_world,
)

GROUP, ALPHA, BETA, LAMBDA = 20, 0.8, -1.5, 0.3
METHODS = ["reinforce", "reinforce_transform", "base_proposal", "repulse"]


def softmax(values):
    top = max(values)
    shares = [math.exp(value - top) for value in values]
    return [share / sum(shares) for share in shares]


def shifted(folder):
    """A reference that is not the policy: its KL would be 0 in the first update."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    return model.eval()


@pytest.mark.parametrize("reduction", ["token_mean", "token_sum"])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_update_is_the_one_of_the_formulas(tmp_path, monkeypatch, method, reduction):
    folder = write_world(tmp_path)
    model, start = AutoModelForCausalLM.from_pretrained(folder / "model"), shifted(folder)
    run = make_run(
        folder,
        monkeypatch,
        f"--method {method} --alpha {ALPHA} --target_dist_beta {BETA} --init_kl_coef {LAMBDA} --n_samples_per_prompt",
        f"{GROUP} --train_batch_size {GROUP} --micro_train_batch_size {GROUP} --token_reduction {reduction}",
    )
    run.roles.reference.role.reference.model.model.load_state_dict(start.state_dict())
    for_policy = caught_gradients(run.roles.actor.role, monkeypatch)
    for_proposal = caught_gradients(run.roles.proposal.role, monkeypatch) if method == "repulse" else {}
    seen = {}
    monkeypatch.setattr(run, "finish", lambda work, measured: seen.update(own=work.experience, proposed=work.proposed))
    run.iterate(NoStop)

    def answers_of(experience):
        assert all(experience.prompt(i) == PROMPT for i in range(len(experience)))
        found = [tuple(experience.response(i)) for i in range(len(experience))]
        assert {len(answer) for answer in found} == {1, 2}, "of different lengths"
        return found

    def mean_log_prob(answer):
        log_probs = token_log_probs(model, answer)
        return log_probs.mean() if reduction == "token_mean" else log_probs.sum()

    answers = answers_of(seen["own"])
    rewards = [reward_of(answer) for answer in answers]
    shaped = [r - ALPHA * math.exp(BETA * r) for r in rewards] if method == "reinforce_transform" else rewards
    kls = [float(token_log_probs(model, a).sum() - token_log_probs(start, a).sum()) for a in answers]
    returns = [reward - LAMBDA * kl for reward, kl in zip(shaped, kls)]
    others = [(sum(returns) - value) / (GROUP - 1) for value in returns]
    terms = [-(value - other) * mean_log_prob(a) for value, other, a in zip(returns, others, answers)]
    if method == "base_proposal":
        weights = softmax([BETA * reward for reward in rewards])
        terms += [ALPHA * weight * mean_log_prob(answer) for weight, answer in zip(weights, answers)]
    if method == "repulse":
        answers = answers_of(seen["proposed"])
        # The proposal is still the policy: the ratio is 1, and so is every psi.
        weights = softmax([BETA * reward_of(answer) for answer in answers])
        terms += [ALPHA * weight * mean_log_prob(answer) for weight, answer in zip(weights, answers)]
        loss = sum((1 / GROUP - weight) * mean_log_prob(answer) for weight, answer in zip(weights, answers)) / GROUP
        assert_close(for_proposal, gradients_of(loss, model), 1e-5)
    assert_close(for_policy, gradients_of(sum(terms) / GROUP, model), 1e-5)
