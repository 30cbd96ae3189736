"""What reward models, preference optimisation and step rewards can get wrong, in words."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from trimtab.report.numbers import percent
from trimtab.report.read import Run, finite
from trimtab.report.rewards import Accuracy, accuracy_of, are_held_out

FLAT_REWARDS = 0.02
"""A spread of rewards at which every pair is a coin toss to the model: sigmoid(0.02) is 0.505."""
FEW_PAIRS = 20


def _chance(run: Run) -> Iterator[str]:
    """Accuracy that guessing would reach as well."""
    if run.job not in ("rm", "dpo"):
        return
    accuracy, which = _accuracy(run)
    if accuracy is None or accuracy.number < FEW_PAIRS:
        return
    low, high = accuracy.interval
    told = f"The accuracy on {accuracy.number:,} {which} is {percent(accuracy.share)}"
    if high < 0.5:
        yield f"{told}, below chance: are the columns of chosen and rejected answers exchanged?"
    elif low < 0.5:
        yield f"{told}, with a 95 % interval from {percent(low)} to {percent(high)}: that may be chance."


def _accuracy(run: Run) -> tuple[Accuracy | None, str]:
    """The best evidence there is: stored rewards, the last evaluation, the last tenth of training."""
    stored = accuracy_of(run.pairs)
    if stored is not None and are_held_out(run):
        return stored, f"{run.held_out} pairs"
    found = run.data.get("evaluation")
    evaluation = found if isinstance(found, dict) else {}
    kept = finite(evaluation.get("rows_kept"))
    last = run.last("eval_accuracy")
    if kept and kept >= 1 and last is not None and 0 <= last <= 1 + 1e-6:
        # Recorded accuracy counts a pair of equal answers as wrong; nobody could get it right.
        equal = min(finite(evaluation.get("rows_equal")) or 0.0, kept)
        return Accuracy(min(last * kept + max(equal, 0.0) / 2, kept), int(kept)), f"{run.held_out} pairs"
    rows = run.rows[-run.tenth("accuracy") :]
    seen = [(finite(row.get("accuracy")), finite(row.get("samples"))) for row in rows]
    known = [(share, number) for share, number in seen if share is not None and 0 <= share <= 1 and number]
    number = sum(number for _, number in known)
    right = sum(share * number for share, number in known)
    return (Accuracy(right, int(number)) if number >= 1 else None), "pairs of the last steps"


def _majority(run: Run) -> Iterator[str]:
    """A process reward model no better than one that gives every step the most frequent label."""
    labels = run.data.get("labels")
    if run.job != "prm" or not isinstance(labels, dict):
        return
    counts = {str(label): finite(number) or 0.0 for label, number in labels.items()}
    ends = run.ends("accuracy")
    reached = run.last("eval_accuracy") if run.last("eval_accuracy") is not None else ends and ends[1]
    if reached is None or len(run.rows) < FEW_PAIRS or sum(counts.values()) <= 0:
        return
    label, number = max(counts.items(), key=lambda item: item[1])
    share = number / sum(counts.values())
    if reached <= share + 0.01:
        yield (
            f"The accuracy is {percent(reached)}; giving every step the label '{label}' would reach {percent(share)}."
        )


def _both_fall(run: Run) -> Iterator[str]:
    if run.job not in ("dpo", "kto"):
        return
    chosen, rejected = run.ends("chosen_reward"), run.ends("rejected_reward")
    if chosen is None or rejected is None or len(run.rows) < FEW_PAIRS:
        return
    fall, other = chosen[0] - chosen[1], rejected[0] - rejected[1]
    if fall > 0.05 and fall > 0.1 * (other - fall) and other > 0:
        good = "chosen" if run.job == "dpo" else "desirable"
        cure = "--nll_loss_coef, a larger --beta" if run.job == "dpo" else "A larger --beta"
        yield (
            f"Both rewards fell, that of the {good} answers by {fall:.3g}: the model has become less likely to give "
            f"the {good} answers too. {cure} or a lower learning rate may help."
        )


def _no_margin(run: Run) -> Iterator[str]:
    ends = run.ends("reward_margin")
    if run.job == "kto" and ends is not None and len(run.rows) >= FEW_PAIRS and ends[1] <= 0:
        yield "Undesirable answers have rewards as high as desirable ones: nothing was learnt from the labels."


def _zero_kl(run: Run) -> Iterator[str]:
    values = [value for _, value in run.series("kl")]
    later = values[len(values) // 2 :]
    if run.job != "kto" or len(values) < FEW_PAIRS:
        return
    zero = sum(value <= 1e-9 for value in later) / len(later)
    moved = fmean(abs(value) for _, value in run.series("chosen_reward")[-len(later) :] or [(0, 0.0)]) > 1e-3
    if zero < 0.9:
        return
    why = (
        "mismatched answers became less likely than they were, so rewards are measured against zero"
        if moved
        else "the model has hardly moved from its reference, or a step holds a single sample"
    )
    yield f"The KL estimate was 0 on {percent(zero, 0)} of the later steps: {why}."


def _flat_rewards(run: Run) -> Iterator[str]:
    spread = finite(run.rewards.get("std"))
    if run.job == "rm" and spread is not None and spread < FLAT_REWARDS:
        yield (
            f"The rewards hardly differ (standard deviation {spread:.3g}): the model gives every answer about the "
            "same reward. A higher learning rate or more steps may help."
        )


RULES = (_chance, _majority, _both_fall, _no_margin, _zero_kl, _flat_rewards)
