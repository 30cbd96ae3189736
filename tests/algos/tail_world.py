"""A world so small that every answer can be listed: policies are tables of logits, a row for each prefix."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trimtab.algos.group_rewards import token_scale
from trimtab.algos.policy_losses import reinforce_loss
from trimtab.algos.tail import ctl_advantages, log_ratios, push_down_advantages, tilted_weights, twist_step_weights


@dataclass(frozen=True)
class World:
    tokens: int
    steps: int
    end: int | None  # the token that ends an answer early

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        return [p for length in range(self.steps) for p in self._sequences(length) if self.end not in p]

    @cached_property
    def answers(self) -> list[tuple[int, ...]]:
        whole = [s for s in self._sequences(self.steps) if self.end not in s[:-1]]
        return whole + [(*p, self.end) for p in self.prefixes if self.end is not None and len(p) < self.steps - 1]

    def _sequences(self, length: int) -> Iterator[tuple[int, ...]]:
        return itertools.product(range(self.tokens), repeat=length)

    def table(self, seed: int, scale: float = 0.7) -> Tensor:
        logits = scale * torch.randn(
            len(self.prefixes), self.tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        return logits.requires_grad_()

    def rewards(self, seed: int = 9) -> Tensor:
        return torch.randn(len(self.answers), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def places(self, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Row, token and owner of all tokens of these answers, one answer after another."""
        rows = torch.tensor([row for a in chosen for row in self._rows[a]])
        tokens = torch.tensor([token for a in chosen for token in self.answers[a]])
        lengths = torch.tensor([len(self.answers[a]) for a in chosen])
        return rows, tokens, torch.repeat_interleave(torch.arange(len(chosen)), lengths)

    @cached_property
    def _rows(self) -> list[list[int]]:
        return [[self.prefixes.index(answer[:t]) for t in range(len(answer))] for answer in self.answers]

    def token_log_probs(self, table: Tensor, chosen: list[int]) -> Tensor:
        rows, tokens, _ = self.places(chosen)
        return table.log_softmax(1)[rows, tokens]

    def log_probs(self, table: Tensor) -> Tensor:
        """Of every answer."""
        everything = list(range(len(self.answers)))
        _, _, owners_N = self.places(everything)
        return table.new_zeros(len(everything)).index_add(0, owners_N, self.token_log_probs(table, everything))

    def sigma(self, table: Tensor, rewards: Tensor, beta: float) -> Tensor:
        return (self.log_probs(table).detach() + beta * rewards).softmax(0)

    def table_of(self, probabilities: Tensor) -> Tensor:
        """The policy that samples answers with these probabilities."""
        rows = []
        for prefix in self.prefixes:
            mass = [
                sum(p for p, a in zip(probabilities.tolist(), self.answers) if a[: len(prefix) + 1] == (*prefix, k))
                for k in range(self.tokens)
            ]
            rows.append(torch.tensor(mass, dtype=torch.float64).log())
        return torch.stack(rows).requires_grad_()

    def groups(self, size: int) -> list[tuple[int, ...]]:
        return list(itertools.product(range(len(self.answers)), repeat=size))


EQUAL = World(tokens=3, steps=2, end=None)  # nine answers of two tokens
RAGGED = World(tokens=3, steps=2, end=0)  # seven answers of one or two tokens


def gradient(value: Tensor, table: Tensor) -> Tensor:
    return torch.autograd.grad(value, table)[0]


# ---- the losses of one batch, as a training step puts them together


def scaled(advantages_N: Tensor, owners_N: Tensor, answers: int, reduction: str) -> Tensor:
    return advantages_N * token_scale(owners_N, answers, reduction).to(advantages_N.dtype)


def proposal_loss(
    world: World,
    policy: Tensor,
    proposal: Tensor,
    chosen: list[int],
    group: int,
    rewards: Tensor,
    beta: float,
    reduction: str = "token_mean",
    second_term: bool = True,
    sampler: Tensor | None = None,
) -> Tensor:
    """L_q of a proposal that is a model, on answers that it gave, or that an earlier state of it gave."""
    _, _, owners_N = world.places(chosen)
    answers = len(chosen)
    policy_N = world.token_log_probs(policy, chosen).detach()
    proposal_N = world.token_log_probs(proposal, chosen)
    twist_N = proposal_N - policy_N
    old_N = proposal_N.detach() if sampler is None else world.token_log_probs(sampler, chosen)
    ratios_GA = log_ratios(policy_N, old_N, owners_N, answers).view(-1, group)
    weights_GA = tilted_weights(rewards[chosen].view(-1, group), beta, ratios_GA)
    steps_N = None
    if second_term:
        steps_N = twist_step_weights(policy_N - old_N, twist_N.detach(), owners_N, torch.arange(answers) // group)
    advantages_N = scaled(ctl_advantages(weights_GA.flatten(), steps_N, owners_N), owners_N, answers, reduction)
    return reinforce_loss(twist_N, advantages_N).sum() / answers


def push_down_loss(
    world: World,
    policy: Tensor,
    proposal: Tensor | None,
    chosen: list[int],
    group: int,
    rewards: Tensor,
    beta: float,
    kappa: float,
    reduction: str = "token_mean",
) -> Tensor:
    """The second term of L_p, on answers of the proposal, or (None) of the policy itself."""
    _, _, owners_N = world.places(chosen)
    answers = len(chosen)
    policy_N = world.token_log_probs(policy, chosen)
    ratios_GA = None
    if proposal is not None:
        old_N = world.token_log_probs(proposal, chosen).detach()
        ratios_GA = log_ratios(policy_N.detach(), old_N, owners_N, answers).view(-1, group)
    weights_GA = tilted_weights(rewards[chosen].view(-1, group), beta, ratios_GA)
    advantages_N = push_down_advantages(weights_GA.flatten(), kappa, group)[owners_N]
    return reinforce_loss(policy_N, scaled(advantages_N, owners_N, answers, reduction)).sum() / answers
