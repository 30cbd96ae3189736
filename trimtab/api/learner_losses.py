"""Losses of a Learner: the named ones, from algos/, and the arguments of the user's own.

A loss is a sum over trained tokens, not a mean: `Learner.optim_step` divides once, by all that was gathered. The
figures beside it are sums too, so that how samples are cut into passes changes nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.algos.advantages import whiten
from trimtab.algos.group_rewards import SHAPED_BY, answer_sums, for_answers, token_scale
from trimtab.algos.policy_losses import kl_estimate, policy_objective, reinforce_loss, surrogate_loss
from trimtab.algos.supervised_losses import dpo_loss, sft_loss_sum
from trimtab.api.arguments import suggested
from trimtab.api.samples import Rows, Sample
from trimtab.config.objective_options import ESTIMATORS
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import RunFailed, UserError
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.plan.workload import TOKENS_ON_CPU, scoring_tokens
from trimtab.train.optimizer import Optimizer
from trimtab.train.rl.micro_batches import cost, make_slice, micro_batches, packed
from trimtab.train.update import LossTerm, MicroBatchLimit, Result, accumulate, memory_guard, retry_smaller, undo_step


@dataclass
class LossInputs:
    """What a loss is made of: N trained tokens of the samples in one pass, sample after sample."""

    log_probs_N: Tensor
    """Of the policy as it is, with gradient."""
    owners_N: Tensor
    """Which of the samples each token is of: 0, 1, 2 and so on."""
    samples: list[Sample]
    """Those of this pass, as they were given."""
    weights_N: Tensor
    """`Sample.weights`, or 1."""
    old_N: Tensor | None = None
    """`Sample.log_probs`: as the tokens were drawn. None: not all samples have them."""
    advantages_N: Tensor | None = None
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None
    """Of the policy at each token, where `entropy=True` was asked for."""

    def sums(self, values_N: Tensor) -> Tensor:
        """The sum over the tokens of each sample: [samples]."""
        return answer_sums(values_N, self.owners_N, len(self.samples))


Loss = Callable[[LossInputs], tuple[Tensor, dict[str, Any]]]
"""The sum that is to be made small, and figures to look at, which are sums too: both come back from
`Learner.forward_backward` divided by the trained tokens of the call."""


@dataclass(frozen=True)
class Known:
    """A loss by name: its function takes the settings as keywords."""

    function: Callable[..., tuple[Tensor, dict[str, Any]]]
    settings: tuple[str, ...]
    columns: tuple[str, ...] = ()  # of samples, that it cannot do without
    together: int = 1  # samples beside each other that belong together


# ---- the losses


def policy_loss(
    inputs: LossInputs,
    kind: str,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
    dual_clip: float | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_loss_coef: float = 0.0,
    token_reduction: str = "token_sum",
) -> tuple[Tensor, dict[str, Any]]:
    """`kind`: of the policy losses that choose no tokens, or reinforce. Figures beside the loss are sums over tokens,
    without weights."""
    log_probs_N, old_N, advantages_N = inputs.log_probs_N, inputs.old_N, inputs.advantages_N
    assert advantages_N is not None
    figures: dict[str, Any] = {"log_prob": log_probs_N.detach().sum()}
    if kind == "reinforce":
        loss_N = reinforce_loss(log_probs_N, advantages_N)
    else:
        assert old_N is not None
        low, high = eps_clip_low_high or (eps_clip, eps_clip)
        sequences = inputs.owners_N, len(inputs.samples)
        settings: dict[str, Any] = {"dual_clip": dual_clip, "temperatures": sapo_temperatures}
        columns = log_probs_N, old_N, advantages_N, *sequences
        loss_N, clipped_N = surrogate_loss(kind, *columns, low=low, high=high, **settings)
        figures["clip_fraction"] = clipped_N.float().sum()
    if old_N is not None:
        figures["log_prob_gap"] = (log_probs_N.detach() - old_N).abs().sum()
        figures["policy_kl"] = kl_estimate(old_N, log_probs_N.detach(), "k3").sum()
    kl_N = entropy_N = None
    if kl_coef:
        assert inputs.reference_N is not None
        kl_N = kl_estimate(log_probs_N, inputs.reference_N, kl_estimator)
        figures["kl"] = kl_N.detach().sum()
    if entropy_loss_coef:
        entropy_N = inputs.entropy_N
        assert entropy_N is not None
        figures["entropy"] = entropy_N.detach().sum()
    loss, _ = policy_objective(
        loss_N,
        _weights(inputs, token_reduction),
        kl_N=kl_N,
        kl_coefficient=kl_coef,
        entropy_N=entropy_N,
        entropy_coefficient=entropy_loss_coef,
    )
    return loss, figures


def sft(inputs: LossInputs, *, token_reduction: str = "token_sum") -> tuple[Tensor, dict[str, Any]]:
    loss = sft_loss_sum(inputs.log_probs_N * _weights(inputs, token_reduction))
    return loss, {"log_prob": inputs.log_probs_N.detach().sum()}


def dpo(
    inputs: LossInputs, *, beta: float = 0.1, label_smoothing: float = 0.0, margin: float = 0.0
) -> tuple[Tensor, dict[str, Any]]:
    """Samples are chosen, rejected, chosen, rejected and so on."""
    assert inputs.reference_N is not None
    ratios_P2 = inputs.sums(inputs.log_probs_N - inputs.reference_N).view(-1, 2)
    h_P = ratios_P2[:, 0] - ratios_P2[:, 1]
    weights_S = inputs.sums(inputs.weights_N) / inputs.sums(torch.ones_like(inputs.weights_N))
    weights_P = weights_S.view(-1, 2)[:, 0]  # that of the chosen one
    loss = (dpo_loss(h_P, beta, label_smoothing, margin) * weights_P).sum()
    return loss, {"margin": h_P.detach().sum(), "accuracy": (h_P > 0).float().sum()}


OF_POLICY = ("kl_coef", "kl_estimator", "entropy_loss_coef", "token_reduction")
BOUNDS = ("eps_clip", "eps_clip_low_high")
LOSSES = {
    "ppo": Known(partial(policy_loss, kind="ppo"), (*BOUNDS, "dual_clip", *OF_POLICY), ("log_probs", "advantages")),
    "gspo": Known(partial(policy_loss, kind="gspo"), (*BOUNDS, *OF_POLICY), ("log_probs", "advantages")),
    "cispo": Known(partial(policy_loss, kind="cispo"), ("eps_clip", *OF_POLICY), ("log_probs", "advantages")),
    "sapo": Known(partial(policy_loss, kind="sapo"), ("sapo_temperatures", *OF_POLICY), ("log_probs", "advantages")),
    "gmpo": Known(partial(policy_loss, kind="gmpo"), (*BOUNDS, *OF_POLICY), ("log_probs", "advantages")),
    "policy_gradient": Known(partial(policy_loss, kind="reinforce"), OF_POLICY, ("advantages",)),
    "sft": Known(sft, ("token_reduction",)),
    "dpo": Known(dpo, ("beta", "label_smoothing", "margin"), ("reference",), together=2),
}
SYNONYMS = {"reinforce": "policy_gradient", "cross_entropy": "sft", "grpo": "ppo"}


def _weights(inputs: LossInputs, token_reduction: str) -> Tensor:
    if token_reduction == "token_sum":
        return inputs.weights_N
    return inputs.weights_N * token_scale(inputs.owners_N, len(inputs.samples), token_reduction)


# ---- by name


@dataclass(frozen=True)
class Chosen:
    """A loss, and what it needs to be given."""

    function: Callable[[LossInputs], tuple[Tensor, dict[str, Any]]]
    columns: tuple[str, ...]
    together: int = 1
    entropy: bool = False  # whether it is given the policy's


def chosen(loss: str | Callable[..., Any], config: dict[str, Any]) -> Chosen:
    """A loss by name, whose settings are checked, or somebody's function."""
    if not isinstance(loss, str):
        if not callable(loss):
            raise UserError(f"loss is of type {type(loss).__name__}; give a name or a function of LossInputs")
        return Chosen(lambda inputs: _checked(loss(inputs, **config)), ())
    name = SYNONYMS.get(loss, loss)
    if name not in LOSSES:
        raise UserError(f"unknown loss {loss!r}; {suggested(loss, [*LOSSES, *SYNONYMS])}, or a function")
    known = LOSSES[name]
    _check_settings(loss, known, config)
    columns = list(known.columns)
    if config.get("kl_coef"):
        columns.append("reference")
    return Chosen(
        lambda inputs: known.function(inputs, **config),
        tuple(columns),
        known.together,
        bool(config.get("entropy_loss_coef")),
    )


def _check_settings(loss: str, known: Known, config: dict[str, Any]) -> None:
    for name, value in config.items():
        if name not in known.settings:
            raise UserError(f"loss {loss!r} has no setting {name!r}; {suggested(name, known.settings)}")
        if name == "token_reduction" and value not in ("token_sum", "token_mean"):
            raise UserError(f"token_reduction is {value!r}; it must be 'token_sum' or 'token_mean'")
        if name == "kl_estimator" and value not in ("k1", "k2", "k3"):
            raise UserError(f"kl_estimator is {value!r}; it must be 'k1', 'k2' or 'k3'")
        if name in ("eps_clip", "beta") and not (is_number(value) and value > 0):
            raise UserError(f"{name} is {value!r}; a number above 0 is needed")
        if name in ("kl_coef", "entropy_loss_coef") and not (is_number(value) and value >= 0):
            raise UserError(f"{name} is {value!r}; a number of at least 0 is needed")
        if name == "label_smoothing" and not (is_number(value) and 0 <= value < 0.5):
            raise UserError(f"label_smoothing is {value!r}; a number from 0 to below 0.5 is needed")
        if name == "margin" and not is_number(value):
            raise UserError(f"margin is {value!r}; a number is needed")
        if name == "eps_clip_low_high" and value is not None and not _are_bounds(value):
            raise UserError(f"eps_clip_low_high is {value!r}; two numbers above 0 are needed, the first at most 1")
        if name == "sapo_temperatures" and not (_are_two(value) and min(value) > 0):
            raise UserError(f"sapo_temperatures is {value!r}; two numbers above 0 are needed")
        if name == "dual_clip" and value is not None and not (is_number(value) and value > 1):
            raise UserError(f"dual_clip is {value!r}; a number above 1 is needed, or None")


def is_number(value: Any) -> bool:
    """Whether it is one, and finite; a library's are as good as Python's."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _are_two(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))


def _are_bounds(value: Any) -> bool:
    return _are_two(value) and 0 < value[0] <= 1 and value[1] > 0


def _checked(found: Any) -> tuple[Tensor, dict[str, Any]]:
    """What somebody's loss gave."""
    loss, figures = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(figures, dict):
        raise UserError("the loss must give a tensor of one number, and a dict of figures: return loss, {}")
    for name, value in figures.items():
        if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float | np.number)):
            raise UserError(f"the loss's figure {name!r} must be one number, a sum over the tokens")
    if not loss.requires_grad:
        raise UserError("the loss has no gradient: it must be made of inputs.log_probs_N")
    return loss.reshape(()), figures


# ---- micro-batches

COLUMNS = ("log_probs_N", "advantages_N", "weights_N", "reference_N")
ADVICE = "gradient_checkpointing=True, lora_rank or bf16=True needs less memory"


@dataclass
class Gathered:
    """What gradients were added up of since the last step."""

    begun: bool = False
    tokens: int = 0
    answers: int = 0
    finite: bool = True  # all losses

    def divisor(self, per: str | float) -> float:
        found = {"tokens": self.tokens, "answers": self.answers}.get(per, per) if isinstance(per, str) else per
        if isinstance(found, str) or not is_number(found) or found <= 0:
            raise UserError(f"per is {per!r}; give 'tokens', 'answers' or a number above 0")
        return float(found)


class Passes:
    def __init__(self, policy: Policy, optimizer: Optimizer, device: Device, tokens: int | None):
        self.policy, self.optimizer, self.device = policy, optimizer, device
        self.tokens = tokens or (8192 if device.is_accelerator else TOKENS_ON_CPU)
        self.limit = MicroBatchLimit()

    def score(self, rows: Rows, temperature: float, model: Policy) -> list[np.ndarray]:
        """Log-probs of the trained tokens of every sample, without gradients."""
        budget = scoring_tokens(self.tokens) if self.device.is_accelerator else self.tokens
        found: dict[int, np.ndarray] = {}

        def attempt() -> None:
            with memory_guard(), scoring(model):
                for samples, batch in self._batches(rows, self._cut(rows, budget, 1)):
                    log_probs = model(batch.to(self.device.torch), temperature=temperature).log_probs_N
                    lengths = rows.lengths_S[torch.tensor(samples)].tolist()
                    parts = log_probs.float().cpu().split(lengths)
                    found.update((i, part.numpy()) for i, part in zip(samples, parts))

        self._until_it_fits(attempt, rows, budget, 1)
        return [found.get(i, np.zeros(0, dtype=np.float32)) for i in range(len(rows))]

    def learn(
        self, rows: Rows, data: Sequence[Sample], loss: Chosen, temperature: float, *, together: int, gathered: bool
    ) -> dict[str, float]:
        """Gradients of the loss are added to what was gathered before, if anything was; the sums of its figures."""

        def attempt() -> dict[str, float]:
            with memory_guard(undo_step(self.optimizer)):
                cut = self._cut(rows, self.tokens, together)
                samples = ([data[i] for i in part] for part in cut)
                batches = (batch for _, batch in self._batches(rows, cut))
                sums = accumulate(
                    self.policy,
                    Mesh(),
                    batches,
                    len(cut),
                    lambda batch: self._share(batch.to(self.device.torch), next(samples), loss, temperature),
                )
            return {name: float(value) for name, value in sums.items()}

        return self._until_it_fits(attempt, rows, self.tokens, together, begun=gathered)

    def _share(self, batch: TokenBatch, samples: list[Sample], loss: Chosen, temperature: float) -> LossTerm:
        out = self.policy(batch, temperature=temperature, entropy=loss.entropy)
        assert out.log_probs_N is not None
        extra = batch.extra
        inputs = LossInputs(
            out.log_probs_N,
            batch.owners_N,
            samples,
            extra["weights_N"],
            extra.get("log_probs_N"),
            extra.get("advantages_N"),
            extra.get("reference_N"),
            out.entropy_N,
        )
        found, figures = loss.function(inputs)
        plain = {name: value.detach() if isinstance(value, Tensor) else value for name, value in figures.items()}
        return LossTerm(found, {**plain, "loss": found.detach()})

    # ---- how they are cut

    def _cut(self, rows: Rows, budget: int, together: int) -> list[list[int]]:
        """The samples of every pass. Those without a trained token are in none."""
        budget = self.limit.of_tokens(budget)
        if together == 1:
            drawn = rows.lengths_S.nonzero()[:, 0].tolist()
            return micro_batches(rows, drawn, count=1, budget=budget) if drawn else []
        pieces = [range(first, first + together) for first in range(0, len(rows), together)]
        return packed(rows, pieces, budget)

    def _batches(self, rows: Rows, passes: list[list[int]]) -> Iterator[tuple[list[int], TokenBatch]]:
        columns = [name for name in COLUMNS if getattr(rows, name) is not None]
        if passes:
            yield from zip(passes, make_slice(rows, passes, *columns).batches())

    def _until_it_fits(
        self, attempt: Callable[[], Result], rows: Rows, budget: int, together: int, *, begun: bool = False
    ) -> Result:
        def shrink(why: str) -> None:
            self.device.release_memory()
            cut = self._cut(rows, budget, together)
            sizes = [(cost(rows, samples), len(samples) // together) for samples in cut]
            if not self.limit.halve(sizes, by_tokens=True):
                longest = max(tokens for tokens, _ in sizes)
                raise RunFailed(f"a pass of {longest:,} tokens does not fit into memory ({why}); {ADVICE}")
            if begun:
                raise RunFailed(
                    f"a pass did not fit into memory ({why}), and what was gathered since the last optim_step is lost; "
                    f"passes have at most {self.limit} from now on: begin the step anew"
                )

        return retry_smaller(attempt, shrink)


# ---- advantages


def advantages(
    rewards: Sequence[float],
    group: int,
    estimator: str = "group_norm",
    *,
    lengths: Sequence[int] | None = None,
    no_advantage_std_norm: bool = False,
) -> list[float]:
    """The advantage of every answer, from the rewards of all.

    rewards    of all answers, those to one prompt beside each other
    group      answers to each prompt
    estimator  as --advantage_estimator: "group_norm" (GRPO), "dr_grpo", "rloo", "reinforce" (REINFORCE++) or
               "reinforce_baseline"
    lengths    trained tokens of each answer. One with 0 is in no group, mean or deviation, and its advantage is 0: give
               them where an episode may end before the model draws anything. The last two estimators bring advantages
               to mean 0 and deviation 1 over all tokens. Unset: every answer counts, and all alike
    no_advantage_std_norm
               the last two bring them to mean 0 only

    >>> trimtab.advantages([0, 1, 1, 1], group=2, estimator="rloo")
    [-1.0, 1.0, 0.0, 0.0]
    """
    if estimator not in ESTIMATORS:
        raise UserError(f"unknown estimator {estimator!r}; {suggested(estimator, ESTIMATORS)}")
    how = ESTIMATORS[estimator]
    if how.critic:
        raise UserError(
            f"estimator {estimator!r} needs a critic, which a Learner has not; take another, or trimtab.ppo"
        )
    rewards_S = _numbers(rewards, "rewards")
    if not isinstance(group, int) or group < 1 or len(rewards_S) % group:
        raise UserError(f"group is {group!r}, and there are {len(rewards_S)} rewards; give a number that divides them")
    if how.grouped and group < 2:
        raise UserError(f"estimator {estimator!r} compares the answers to a prompt; group must be above 1")
    counts_S = torch.ones(len(rewards_S), dtype=torch.int64)
    if lengths is not None:
        counts_S = _numbers(lengths, "lengths").long()
        if len(counts_S) != len(rewards_S) or counts_S.min() < 0:
            raise UserError("lengths must have a number of at least 0 for each reward")
        if not bool(counts_S.any()):
            raise UserError("lengths are all 0: there is nothing to learn from")
    groups_S = torch.arange(len(rewards_S)) // group
    shaped_S = for_answers(SHAPED_BY[how.group], groups_S, rewards_S, counted_S=counts_S > 0)
    if not how.whitened:
        if no_advantage_std_norm:
            raise UserError(
                f"no_advantage_std_norm has no effect: estimator {estimator!r} does not whiten; leave it out"
            )
        return shaped_S.tolist()
    whitened_N = whiten(shaped_S.repeat_interleave(counts_S), scale=not no_advantage_std_norm)
    return torch.where(counts_S > 0, whitened_N[counts_S.cumsum(0) - 1], 0).tolist()


def _numbers(values: Sequence[float], name: str) -> torch.Tensor:
    try:
        found = torch.tensor([float(value) for value in values], dtype=torch.float32)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a list of numbers") from None
    if not len(found):
        raise UserError(f"{name} is empty; give at least one number")
    if not bool(found.isfinite().all()):
        place = int((~found.isfinite()).nonzero()[0])
        raise UserError(f"{name}[{place}] is {float(found[place])}; all must be finite")
    return found
