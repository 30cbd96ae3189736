"""Losses of a Learner: those that are known by name, from algos/, and what any other one is given.

A loss is a sum over trained tokens, not a mean: `Learner.optim_step` divides once, by all that was gathered. The
figures beside it are sums too, so that how samples are cut into passes changes nothing.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.algos.group_rewards import answer_sums, token_scale
from trimtab.algos.policy_losses import cispo_loss, gspo_loss, kl_estimate, ppo_loss, reinforce_loss
from trimtab.algos.preference_losses import dpo_loss
from trimtab.algos.supervised_losses import sft_loss_sum
from trimtab.api.samples import Sample
from trimtab.api.suggesting import suggested
from trimtab.errors import UserError


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
    columns: tuple[str, ...] = ()  # of samples, that it cannot do without
    together: int = 1  # samples beside each other that belong together


# ---- the losses


def ppo(
    inputs: LossInputs,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
    dual_clip: float | None = None,
    **others: Any,
) -> tuple[Tensor, dict[str, Any]]:
    low, high = eps_clip_low_high or (eps_clip, eps_clip)
    log_probs_N, old_N, advantages_N = _policy_columns(inputs)
    return _surrogate(inputs, *ppo_loss(log_probs_N, old_N, advantages_N, low, high, dual_clip), **others)


def gspo(
    inputs: LossInputs,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
    **others: Any,
) -> tuple[Tensor, dict[str, Any]]:
    low, high = eps_clip_low_high or (eps_clip, eps_clip)
    found = gspo_loss(*_policy_columns(inputs), inputs.owners_N, len(inputs.samples), low, high)
    return _surrogate(inputs, *found, **others)


def cispo(inputs: LossInputs, *, eps_clip: float = 0.2, **others: Any) -> tuple[Tensor, dict[str, Any]]:
    return _surrogate(inputs, *cispo_loss(*_policy_columns(inputs), eps_clip), **others)


def policy_gradient(inputs: LossInputs, **others: Any) -> tuple[Tensor, dict[str, Any]]:
    assert inputs.advantages_N is not None
    return _surrogate(inputs, reinforce_loss(inputs.log_probs_N, inputs.advantages_N), None, **others)


def sft(inputs: LossInputs, *, token_reduction: str = "token_sum") -> tuple[Tensor, dict[str, Any]]:
    return sft_loss_sum(inputs.log_probs_N * _weights(inputs, token_reduction)), {
        "log_prob": inputs.log_probs_N.detach().sum()
    }


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


LOSSES = {
    "ppo": Known(ppo, ("log_probs", "advantages")),
    "gspo": Known(gspo, ("log_probs", "advantages")),
    "cispo": Known(cispo, ("log_probs", "advantages")),
    "policy_gradient": Known(policy_gradient, ("advantages",)),
    "sft": Known(sft),
    "dpo": Known(dpo, ("reference",), together=2),
}
SYNONYMS = {"reinforce": "policy_gradient", "cross_entropy": "sft", "grpo": "ppo"}


def _policy_columns(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    assert inputs.old_N is not None and inputs.advantages_N is not None
    return inputs.log_probs_N, inputs.old_N, inputs.advantages_N


def _surrogate(
    inputs: LossInputs,
    loss_N: Tensor,
    clipped_N: Tensor | None,
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_loss_coef: float = 0.0,
    token_reduction: str = "token_sum",
) -> tuple[Tensor, dict[str, Any]]:
    """What losses of a policy have in common: terms beside the surrogate, what tokens count, and figures."""
    weights_N, log_probs_N = _weights(inputs, token_reduction), inputs.log_probs_N
    figures: dict[str, Any] = {"log_prob": log_probs_N.detach().sum()}
    if clipped_N is not None:
        figures["clip_fraction"] = clipped_N.float().sum()
    if inputs.old_N is not None:
        gap_N = log_probs_N.detach() - inputs.old_N
        figures |= {"log_prob_gap": gap_N.abs().sum()}
        figures |= {"policy_kl": kl_estimate(inputs.old_N, log_probs_N.detach(), "k3").sum()}
    loss = (loss_N * weights_N).sum()
    if kl_coef:
        assert inputs.reference_N is not None
        kl_N = kl_estimate(log_probs_N, inputs.reference_N, kl_estimator)
        figures["kl"] = kl_N.detach().sum()
        loss = loss + kl_coef * (kl_N * weights_N).sum()
    if entropy_loss_coef:
        assert inputs.entropy_N is not None
        figures["entropy"] = inputs.entropy_N.detach().sum()
        loss = loss - entropy_loss_coef * (inputs.entropy_N * weights_N).sum()
    return loss, figures


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
    taken = _settings(known.function)
    for name, value in config.items():
        if name not in taken:
            raise UserError(f"loss {loss!r} has no setting {name!r}; {suggested(name, taken)}")
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
        if name == "dual_clip" and value is not None and not (is_number(value) and value > 1):
            raise UserError(f"dual_clip is {value!r}; a number above 1 is needed, or None")


def is_number(value: Any) -> bool:
    """Whether it is one, and finite; a library's are as good as Python's."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _are_bounds(value: Any) -> bool:
    two = isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))
    return two and 0 < value[0] <= 1 and value[1] > 0


def _settings(function: Callable[..., Any]) -> list[str]:
    """Keywords of a loss, with those that all losses of a policy have where it hands them on."""
    own = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
        names += _settings(_surrogate)
    return names


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
