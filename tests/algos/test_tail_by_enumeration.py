"""RePULSe's identities, exactly: means over all answers, or all groups of answers, of a world that can be listed."""

import math

import pytest
import torch
from torch import Tensor

from tests.algos.tail_world import EQUAL, RAGGED, World, gradient, proposal_loss, push_down_loss, scaled
from trimtab.algos.group_rewards import answer_sums
from trimtab.algos.policy_losses import kl_estimate, reinforce_loss
from trimtab.algos.tail import (
    answer_returns,
    ctl_advantages,
    effective_samples,
    log_ratios,
    minus_exponential,
    push_down_factor,
    reinforce_advantages,
    tilted_weights,
    twist_step_weights,
)

WORLDS = pytest.mark.parametrize("world", [EQUAL, RAGGED], ids=["equal", "ragged"])
LAMBDA = 0.4


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert expected.abs().max() > 0.01, "nothing to compare"
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def log_z(world: World, table: Tensor, rewards: Tensor, beta: float) -> Tensor:
    return (world.log_probs(table) + beta * rewards).logsumexp(0)


def mean_over_groups(world: World, table: Tensor, group: int, loss_of) -> Tensor:
    """The mean of a loss over all groups of answers of `table`, which no gradient reaches as a sampler."""
    probabilities = world.log_probs(table).detach().exp().tolist()
    total = torch.zeros((), dtype=torch.float64)
    for chosen in world.groups(group):
        total = total + math.prod(probabilities[a] for a in chosen) * loss_of(list(chosen))
    return total


@WORLDS
def test_the_mean_score_under_sigma_is_the_gradient_of_log_z(world):
    table, rewards = world.table(1), world.rewards()
    sigma = world.sigma(table, rewards, -2.0)
    close(gradient((sigma * world.log_probs(table)).sum(), table), gradient(log_z(world, table, rewards, -2.0), table))


@WORLDS
@pytest.mark.parametrize("group", [2, 3])
def test_reinforce_with_kl_in_the_return_climbs_reward_less_kl(world, group):
    table, start, rewards = world.table(1), world.table(2).detach(), world.rewards()

    def loss_of(chosen: list[int]) -> Tensor:
        _, _, owners_N = world.places(chosen)
        log_probs_N = world.token_log_probs(table, chosen)
        kl_N = kl_estimate(log_probs_N.detach(), world.token_log_probs(start, chosen), "k1").double()
        returns_S = answer_returns(rewards[chosen], kl_N, LAMBDA, owners_N)
        advantages_N = reinforce_advantages(returns_S.view(1, group)).flatten()[owners_N]
        return reinforce_loss(log_probs_N, scaled(advantages_N, owners_N, group, "token_sum")).sum() / group

    log_probs = world.log_probs(table)
    objective = (log_probs.exp() * (rewards - LAMBDA * (log_probs - world.log_probs(start)))).sum()
    found = gradient(mean_over_groups(world, table, group, loss_of), table)
    close(found, -gradient(objective, table), tolerance=1e-6)  # the KL is fp32


@WORLDS
def test_the_reward_transform_adds_alpha_z_times_the_gradient_of_log_z(world):
    table, rewards, alpha, beta = world.table(1), world.rewards(), 0.7, -1.5
    probabilities = world.log_probs(table).exp()
    extra = (probabilities * (minus_exponential(rewards, alpha, beta) - rewards)).sum()
    z = log_z(world, table, rewards, beta)
    close(-gradient(extra, table), alpha * z.exp().detach() * gradient(log_z(world, table, rewards, beta), table))


# With equal lengths the mean over tokens is the sum divided by their number; with different ones only the sum is exact.
REDUCTIONS = pytest.mark.parametrize(
    "world, reduction, steps",
    [(EQUAL, "token_mean", 2), (EQUAL, "token_sum", 1), (RAGGED, "token_sum", 1)],
    ids=["equal, mean", "equal, sum", "ragged, sum"],
)


def second_term(world: World, reduction: str, group: int) -> tuple[Tensor, Tensor]:
    """Its gradient for the first answers, and on average."""
    policy, proposal, rewards = world.table(1), world.table(2), world.rewards()

    def loss_of(chosen: list[int]) -> Tensor:
        arguments = (world, policy, proposal, chosen, group, rewards, -1.0, reduction)
        return proposal_loss(*arguments) - proposal_loss(*arguments, second_term=False)

    mean = mean_over_groups(world, proposal, group, loss_of)
    return gradient(loss_of([0, 1, 2][:group]), proposal), gradient(mean, proposal)


@pytest.mark.short(4)
@REDUCTIONS
@pytest.mark.parametrize("group", [2, 3])
def test_the_second_term_of_ctl_has_mean_zero_for_every_group_size(world, reduction, steps, group):
    one, mean = second_term(world, reduction, group)
    assert one.abs().max() > 0.01
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-12, rtol=0)


@pytest.mark.parametrize("group", [2, 3])
def test_over_the_mean_of_tokens_of_uneven_answers_the_second_term_of_ctl_is_more_than_noise(group):
    _, mean = second_term(RAGGED, "token_mean", group)
    assert mean.abs().max() > 0.001


def every_answer(world: World) -> tuple[Tensor, list[int]]:
    """A uniform proposal, and all answers as often as it gives them: what means over large groups tend to."""
    counts = {2: 1} if world is EQUAL else {1: 3, 2: 1}
    chosen = [a for a, answer in enumerate(world.answers) for _ in range(counts[len(answer)])]
    return torch.zeros(len(world.prefixes), world.tokens, dtype=torch.float64), chosen


@REDUCTIONS
@pytest.mark.parametrize("second_term", [True, False])
def test_ctl_descends_on_the_kl_from_sigma_to_q(world, reduction, steps, second_term):
    policy, proposal, rewards, beta = world.table(1), world.table(2), world.rewards(), -1.0
    uniform, chosen = every_answer(world)
    loss = proposal_loss(
        world, policy, proposal, chosen, len(chosen), rewards, beta, reduction, second_term, sampler=uniform
    )
    sigma = world.sigma(policy, rewards, beta)
    divergence = (sigma * (sigma.log() - world.log_probs(proposal))).sum()
    close(len(chosen) * gradient(loss, proposal), gradient(divergence, proposal) / steps)


@WORLDS
def test_weights_are_uniform_when_q_is_sigma(world):
    policy, rewards, beta = world.table(1), world.rewards(), -3.0
    proposal = world.table_of(world.sigma(policy, rewards, beta))
    everything = list(range(len(world.answers)))
    _, _, owners_N = world.places(everything)
    policy_N, proposal_N = (world.token_log_probs(table, everything) for table in (policy, proposal))
    ratios = log_ratios(policy_N, proposal_N, owners_N, len(everything))
    weights = tilted_weights(rewards[None], beta, ratios[None])
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / len(everything)))
    torch.testing.assert_close(effective_samples(weights), torch.tensor([float(len(everything))]).double())


@WORLDS
@pytest.mark.parametrize("reduction", ["token_mean", "token_sum"])
def test_ctl_has_no_gradient_at_all_when_q_is_p_and_beta_is_zero(world, reduction):
    policy = world.table(1)
    proposal = policy.detach().clone().requires_grad_()
    chosen = [0, 5, 6, 6]
    assert world is EQUAL or {len(world.answers[a]) for a in chosen} == {1, 2}
    loss = proposal_loss(world, policy, proposal, chosen, len(chosen), world.rewards(), 0.0, reduction)
    assert gradient(loss, proposal).abs().max() < 1e-15


@WORLDS
@pytest.mark.parametrize("beta", [-0.5, -1.0])
def test_ctl_on_exact_gradients_takes_q_to_sigma(world, beta):
    policy, rewards = world.table(1), world.rewards()
    proposal = policy.detach().clone().requires_grad_()
    uniform, chosen = every_answer(world)
    arguments = (chosen, len(chosen), rewards, beta, "token_sum")
    for _ in range(500):
        loss = proposal_loss(world, policy, proposal, *arguments, sampler=uniform)
        with torch.no_grad():
            proposal -= 2 * len(chosen) * gradient(loss, proposal)
    assert divergence_from(world, proposal, world.sigma(policy, rewards, beta)) < 1e-8


@WORLDS
def test_ctl_on_exact_gradients_takes_p_times_a_head_to_sigma(world):
    policy, rewards, beta = world.table(1).detach(), world.rewards(), -1.0
    uniform, chosen = every_answer(world)
    answers = len(chosen)
    rows, tokens, owners_N = world.places(chosen)
    ratio_N = world.token_log_probs(policy, chosen) - world.token_log_probs(uniform, chosen)
    weights_GA = tilted_weights(rewards[chosen][None], beta, answer_sums(ratio_N, owners_N, answers)[None])
    head = torch.zeros_like(policy, requires_grad=True)
    for _ in range(1000):
        twist_N = head[rows, tokens]
        steps_N = twist_step_weights(ratio_N, twist_N.detach(), owners_N, torch.zeros(answers, dtype=torch.int64))
        loss = reinforce_loss(twist_N, ctl_advantages(weights_GA.flatten(), steps_N, owners_N)).sum()
        with torch.no_grad():
            head -= 2 * gradient(loss, head)
    proposal = (policy + head.detach()).log_softmax(-1)
    assert divergence_from(world, proposal, world.sigma(policy, rewards, beta)) < 1e-8


def divergence_from(world: World, proposal: Tensor, sigma: Tensor) -> float:
    return (sigma * (sigma.log() - world.log_probs(proposal).detach())).sum().item()


@pytest.mark.parametrize("beta", [-0.5, -1.0])
@WORLDS
def test_ctl_on_groups_of_500_samples_takes_q_to_sigma(world, beta):
    policy, rewards = world.table(1), world.rewards()
    sigma = world.sigma(policy, rewards, beta)
    proposal = policy.detach().clone().requires_grad_()
    before = divergence_from(world, proposal, sigma)
    optimiser = torch.optim.Adam([proposal], lr=0.03)
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        optimiser.param_groups[0]["lr"] = 0.03 * (1 - step / 200)
        probabilities = world.log_probs(proposal).detach().exp()
        chosen = torch.multinomial(probabilities, 500, replacement=True, generator=generator).tolist()
        optimiser.zero_grad()
        proposal_loss(world, policy, proposal, chosen, 500, rewards, beta, "token_sum").backward()
        optimiser.step()
    assert divergence_from(world, proposal, sigma) < 1e-3 < before / 5


@WORLDS
@pytest.mark.parametrize("scale", ["per_sample", "per_group"])
def test_the_push_down_term_descends_on_kappa_log_z(world, scale):
    """One group of all answers, weighted as a proposal would be that gives each equally often."""
    policy, rewards, beta, alpha = world.table(1), world.rewards(), -1.0, 0.3
    everything = list(range(len(world.answers)))
    multiplier = push_down_factor(alpha, len(everything), scale)
    proposal = world.table_of(torch.full((len(everything),), 1 / len(everything), dtype=torch.float64))
    loss = push_down_loss(world, policy, proposal, everything, len(everything), rewards, beta, multiplier, "token_sum")
    assert multiplier == (alpha if scale == "per_group" else alpha / len(everything))
    expected = multiplier * gradient(log_z(world, policy, rewards, beta), policy)
    torch.testing.assert_close(gradient(loss, policy), expected, atol=1e-12, rtol=0)
