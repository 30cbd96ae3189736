"""RePULSe's identities, exactly, through the code that trains and with real models (the algebra: tests/algos)."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.job_run import NoStop
from tests.train.tail.small_world import (
    ANSWERS,
    REWARDS,
    all_log_probs,
    assert_close,
    caught_gradients,
    experience_of,
    gradients_of,
    groups,
    make_run,
    sigma,
    token_log_probs,
    write_world,
)
from trimtab.train.tail.tail_run import TailIteration, compute_policy_advantages, compute_proposal_advantages

BETA, LAMBDA = -1.5, 0.4
EVERYTHING = len(ANSWERS)


@pytest.fixture
def folder(tmp_path):
    return write_world(tmp_path)


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def words(method: str, group: int, more: str = "") -> str:
    sizes = f"--n_samples_per_prompt {group} --train_batch_size {group} --micro_train_batch_size {group}"
    return f"--method {method} {sizes} --target_dist_beta {BETA} --token_reduction token_sum {more}"


def every_answer(run):
    """All answers as one group, each as likely as the others to the proposal."""
    experience = experience_of(ANSWERS)
    experience.old_N = torch.zeros(len(experience.owners_N))
    run.batcher.fill(experience, "policy_N", run.roles.actor, "log_probs")
    return experience


def test_the_push_down_term_descends_on_kappa_times_log_z(folder, model, monkeypatch):
    run = make_run(folder, monkeypatch, words("repulse", EVERYTHING, "--alpha 0.7 --push_down_scale per_group"))
    proposed = every_answer(run)
    proposed.twist_N = torch.zeros_like(proposed.old_N)
    _, proposed.advantages_N = compute_proposal_advantages(proposed, run.options)
    silent = experience_of(ANSWERS)
    silent.advantages_N = torch.zeros(len(silent.owners_N))
    run.iteration = TailIteration(silent, 1, {}, proposed=proposed)
    found = caught_gradients(run.roles.actor.role, monkeypatch)
    run.update(run.iteration, list(range(len(silent))))
    log_z = (all_log_probs(model) + BETA * REWARDS).logsumexp(0)
    assert_close(found, gradients_of(0.7 * log_z, model))


@pytest.mark.parametrize("group", [2, pytest.param(3, marks=pytest.mark.long)])
def test_reinforce_climbs_reward_less_kl_in_the_mean_over_all_groups(folder, model, monkeypatch, group):
    run = make_run(folder, monkeypatch, words("reinforce", group, f"--init_kl_coef {LAMBDA}"))
    start = torch.randn(EVERYTHING, 2, generator=torch.Generator().manual_seed(3)) - 2  # any log-probs of p_0
    experience = experience_of([answer for chosen in groups(group) for answer in chosen], group=group)
    place = {answer: i for i, answer in enumerate(ANSWERS)}
    own = {answer: token_log_probs(model, answer).detach() for answer in ANSWERS}
    answers = [tuple(experience.response(i)) for i in range(len(experience))]
    experience.old_N = torch.cat([own[answer] for answer in answers])
    experience.reference_N = torch.cat([start[place[answer], : len(answer)] for answer in answers])
    compute_policy_advantages(experience, run.options, LAMBDA)
    chances = [math.exp(sum(float(own[answer].sum()) for answer in chosen)) for chosen in groups(group)]
    weights = torch.tensor(chances).repeat_interleave(group)[experience.owners_N] * len(chances)
    experience.advantages_N = experience.advantages_N * weights
    run.iteration = TailIteration(experience, 1, {})
    found = caught_gradients(run.roles.actor.role, monkeypatch)
    run.update(run.iteration, list(range(len(experience))))
    log_probs = all_log_probs(model)
    starts = torch.stack([start[i, : len(answer)].sum() for i, answer in enumerate(ANSWERS)])
    objective = (log_probs.exp() * (REWARDS - LAMBDA * (log_probs - starts))).sum()
    assert_close(found, gradients_of(-objective, model), tolerance=1e-4)


# A proposal that takes every token with 1/4 says the end alone four times as often as each of the other answers.
UNIFORM = [ANSWERS[0]] * 4 + ANSWERS[1:]


def teach_exactly(run, step: int = 0) -> None:
    """An update of the proposal as if it had sampled all answers of the uniform one, which the mean over large groups
    tends to."""
    proposed, role = experience_of(UNIFORM), run.roles.proposal
    proposed.old_N = torch.full((len(proposed.owners_N),), -math.log(4))
    run.batcher.fill(proposed, "policy_N", run.roles.actor, "log_probs")
    if run.options.proposal == "model":
        run.batcher.fill(proposed, "twist_N", role, "log_probs")
        proposed.twist_N = proposed.twist_N - proposed.policy_N
    else:
        run.batcher.fill(proposed, "twist_N", role, "log_twists")
    compute_proposal_advantages(proposed, run.options)
    parts = run.batcher.parts(role, proposed, list(range(len(UNIFORM))), "advantages_N", "policy_N")
    role.call("update", parts, totals={"answers": 1.0}, step=step)


@pytest.mark.parametrize("loss", ["ctl", "ctl_nosecondterm"])
def test_the_proposal_descends_on_the_kl_from_sigma_to_it(folder, model, monkeypatch, loss):
    run = make_run(folder, monkeypatch, words("repulse", len(UNIFORM), f"--proposal_loss {loss}"))
    found = caught_gradients(run.roles.proposal.role, monkeypatch)
    teach_exactly(run)
    log_q = all_log_probs(model)  # it starts as the policy
    target = sigma(log_q, BETA)
    assert_close(found, gradients_of((target * (target.log() - log_q)).sum(), model))


@pytest.mark.parametrize("reduction", ["token_mean", "token_sum"])
def test_a_proposal_that_is_the_policy_has_no_gradient_where_nothing_is_tilted(folder, monkeypatch, reduction):
    more = f"--token_reduction {reduction}"
    run = make_run(folder, monkeypatch, words("repulse", 20, more), target_dist_beta=0.0)
    found = caught_gradients(run.roles.proposal.role, monkeypatch)
    run.iterate(NoStop)
    assert found and max(float(value.abs().max()) for value in found.values()) < 1e-6


# Each kind of proposal, and the learning rate and number of updates that take it to sigma.
KINDS = {
    "model": ("", 3e-3, 150),
    "adapters": ("--proposal_lora_rank 8 --target_modules all-linear", 1e-2, 150),
    "twist model": ("--proposal modulation_model", 1e-2, 150),
    "linear head": ("--proposal modulation_linear_head", 3e-2, 1200),
    "nn head": ("--proposal modulation_nn_head", 1e-3, 1200),
}


def learner_of(folder, monkeypatch, kind: str, beta: float, group: int):
    option, rate, updates = KINDS[kind]
    more = f"{option} --proposal_learning_rate {rate} --actor_learning_rate 0 --alpha 0 --num_episodes {updates}"
    more += f" --lr_scheduler cosine --lr_warmup_ratio 0 --target_dist_beta {beta}"
    return make_run(folder, monkeypatch, words("repulse", group, more))


def divergence(run, model, beta: float) -> float:
    """KL(sigma || q)"""
    everything = experience_of(ANSWERS)
    run.batcher.fill(everything, "old_N", run.roles.proposal, "log_probs")
    log_q = torch.stack([part.sum() for part in everything.old_N.split(everything.lengths_S.tolist())])
    assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-4)
    target = sigma(all_log_probs(model), beta)
    return float((target * (target.log() - log_q)).sum())


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "kind", [kind if KINDS[kind][2] < 200 else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_every_proposal_learns_sigma_and_then_its_weights_are_equal(folder, model, monkeypatch, kind):
    run = learner_of(folder, monkeypatch, kind, -1.0, len(UNIFORM))
    assert divergence(run, model, -1.0) > 0.1
    for step in range(KINDS[kind][2]):
        teach_exactly(run, step)
    assert divergence(run, model, -1.0) < 1e-3
    # What it says then is what it was trained to say, and weighs alike.
    proposed = run.sample_proposal(TailIteration(experience_of(UNIFORM), 1, {}))
    run.score_proposed(proposed)
    run.batcher.fill(proposed, "reference_N", run.roles.proposal, "log_probs")
    # Twists of the linear head are 113 large, where numbers lie 8e-6 apart.
    rounding = (
        0.0 if proposed.twist_N is None else 4 * torch.finfo(torch.float32).eps * float(proposed.twist_N.abs().max())
    )
    torch.testing.assert_close(proposed.reference_N, proposed.sampled_N, atol=max(2e-5, rounding), rtol=0)
    figures, _ = compute_proposal_advantages(proposed, run.options)
    assert figures["effective_samples"] > 0.98 * len(UNIFORM)


@pytest.mark.long
@pytest.mark.parametrize("beta", [-0.5, -1.0])
@pytest.mark.parametrize("kind", ["model", "adapters", "twist model"])
def test_every_proposal_learns_sigma_from_its_own_samples(folder, model, monkeypatch, kind, beta):
    run = learner_of(folder, monkeypatch, kind, beta, 500)
    for _ in range(KINDS[kind][2]):
        run.iterate(NoStop)
    assert divergence(run, model, beta) < 1e-3
