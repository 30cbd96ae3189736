"""Findings: what deserves a second look in a run, in words.

First the rules of single jobs, then those of every job, among them the alarms that the run itself recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean

from trimtab.report.distributions import Accuracy, accuracy_of, are_held_out
from trimtab.report.formatting import percent, plain, short_number, spans
from trimtab.report.run_data import RunData, finite
from trimtab.report.summary import success_of

FLAT_REWARDS = 0.02
"""A spread of rewards at which every pair is a coin toss to the model: sigmoid(0.02) is 0.505."""
FEW_PAIRS = 20


def _chance(run: RunData) -> Iterator[str]:
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


def _accuracy(run: RunData) -> tuple[Accuracy | None, str]:
    """The best evidence there is: stored rewards, the last evaluation, the last tenth of training."""
    stored = accuracy_of(run.pairs)
    if stored is not None and are_held_out(run):
        return stored, f"{run.held_out} pairs"
    found = run.data.get("evaluation")
    evaluation = found if isinstance(found, dict) else {}
    kept = finite(evaluation.get("rows_kept"))
    last = run.last("eval_accuracy")
    if kept and kept >= 1 and last is not None and 0 <= last <= 1 + 1e-6:
        # Recorded accuracy counts a pair of equal answers as wrong; no model could get it right.
        equal = min(finite(evaluation.get("rows_equal")) or 0.0, kept)
        return Accuracy(min(last * kept + max(equal, 0.0) / 2, kept), int(kept)), f"{run.held_out} pairs"
    rows = run.rows[-run.tenth("accuracy") :]
    seen = [(finite(row.get("accuracy")), finite(row.get("samples"))) for row in rows]
    known = [(share, number) for share, number in seen if share is not None and 0 <= share <= 1 and number]
    number = sum(number for _, number in known)
    right = sum(share * number for share, number in known)
    return (Accuracy(right, int(number)) if number >= 1 else None), "pairs of the last steps"


def _majority(run: RunData) -> Iterator[str]:
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


def _both_fall(run: RunData) -> Iterator[str]:
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


def _no_margin(run: RunData) -> Iterator[str]:
    ends = run.ends("reward_margin")
    if run.job == "kto" and ends is not None and len(run.rows) >= FEW_PAIRS and ends[1] <= 0:
        yield "Undesirable answers have rewards as high as desirable ones: nothing was learnt from the labels."


def _zero_kl(run: RunData) -> Iterator[str]:
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


def _flat_rewards(run: RunData) -> Iterator[str]:
    spread = finite(run.rewards.get("std"))
    if run.job == "rm" and spread is not None and spread < FLAT_REWARDS:
        yield (
            f"The rewards hardly differ (standard deviation {spread:.3g}): the model gives every answer about the "
            "same reward. A higher learning rate or more steps may help."
        )


OBJECTIVE_RULES = (_chance, _majority, _both_fall, _no_margin, _zero_kl, _flat_rewards)


# ---- Findings of RL.


ENOUGH_ITERATIONS = 20
"""Below this many iterations a trend is noise."""
MUCH_WAITING, MUCH_READ_AGAIN = 0.5, 0.5
"""Of the time; of the tokens that were trained."""


def _success(run: RunData) -> Iterator[str]:
    success = success_of(run)
    if not run.is_rl or success is None or len(success.points) < 2 or run.steps < ENOUGH_ITERATIONS:
        return
    # A fall is an alarm of the run itself.
    if success.after <= success.before and not (success.is_share and success.before == 1):
        before, after = success.shown(success.before), success.shown(success.after)
        yield f"{success.name.capitalize()} did not rise: {before} before training, {after} at the end."


def _reward(run: RunData) -> Iterator[str]:
    ends = run.ends("reward")
    if not run.is_rl or ends is None or len(run.series("reward")) < ENOUGH_ITERATIONS:
        return
    spread = run.ends("reward_std")
    if ends[1] < ends[0] - 0.1 * (spread[0] if spread else abs(ends[0])):
        yield f"The mean reward fell from {ends[0]:.3g} to {ends[1]:.3g}."


def _outliving(run: RunData) -> Iterator[str]:
    """Of answers that may outlive an update: whether they should."""
    ages, waiting = run.series("age_max"), run.ends("waiting")
    if len(ages) < ENOUGH_ITERATIONS:
        return
    if not any(age for _, age in ages):
        yield (
            "No answer outlived an update: without --async_train the run would have learnt from answers as new, and "
            "their sampled log-probs would have been exact."
        )
    if waiting is not None and waiting[1] > MUCH_WAITING:
        yield (
            f"At the end the trainer had nothing to do for {percent(waiting[1], 0)} of the time, although answers may "
            "outlive an update: give more engines or reward workers, or raise --async_queue_size."
        )
    read_again, tokens = run.total("read_again"), run.total("tokens")
    if tokens and read_again > MUCH_READ_AGAIN * tokens:
        yield (
            f"For every token that was trained {short_number(read_again / tokens)} were read again by new weights: "
            "answers are long for so many updates; raise --rollout_batch_size, or lower --async_queue_size."
        )


RL_RULES = (_success, _reward, _outliving)


# ---- Findings of every job, and alarms of the run itself.


ENOUGH_STEPS = 20
"""Below this many steps a trend is noise."""
MOST_ALARMS = 20
FIGURE = re.compile(r"-?\d[\d.,]*(e[-+]?\d+)?")


def findings(run: RunData) -> list[str]:
    """Sentences about the run, the gravest first; empty when nothing is unusual."""
    return [*_progress(run), *warnings(run), *run.problems]


def warnings(run: RunData) -> list[str]:
    """The same without how far the run is, and without what could not be read."""
    rules = (_skipped, _alarms, *RL_RULES, _loss_trend, *OBJECTIVE_RULES, _overlap, _data)
    return [sentence for rule in rules for sentence in rule(run)]


def _progress(run: RunData) -> Iterator[str]:
    planned = finite(run.manifest.get("steps"))
    # Filtering uses up prompts, so such a run may come to its end sooner than planned.
    if run.options.get("dynamic_filtering") is True and run.has_saved_model:
        planned = None
    if not run.steps:
        yield "No iteration is finished yet." if run.is_rl else "No optimiser step is recorded yet."
    elif planned is not None and run.rows[-1]["step"] < planned:
        yield (
            f"{run.unit.capitalize()} {run.rows[-1]['step']} of {planned:.0f} is the last one recorded: still going, "
            "or stopped early."
        )
    elif not run.has_saved_model:
        yield "There is no saved model in this folder: the run is still going, or it was stopped before its end."


def _skipped(run: RunData) -> Iterator[str]:
    skipped = int(max((value for _, value in run.series("skipped_steps")), default=0))
    if skipped:
        was = "step was" if skipped == 1 else "steps were"
        yield (
            f"{skipped} optimiser {was} skipped because the loss or a gradient was not finite. "
            "A lower learning rate or a look at those rows may help."
        )


def alarms(run: RunData) -> list[str]:
    """What the run itself told while it worked."""
    return list(_alarms(run))


def _alarms(run: RunData) -> Iterator[str]:
    """Each kind of alarm once, with the steps at which it held."""
    steps: dict[str, list[int]] = {}
    latest: dict[str, str] = {}
    for row in run.rows:
        listed = row.get("alarms")
        for text in listed if isinstance(listed, list) else ():
            if isinstance(text, str) and text.strip():
                # The same alarm has other figures at every step.
                kind = FIGURE.sub("0", text)
                latest[kind] = text.strip()
                steps.setdefault(kind, []).append(row["step"])
    for kind, held in list(steps.items())[:MOST_ALARMS]:
        text = latest[kind]
        noun = run.unit if len(held) == 1 else f"{run.unit}s"
        as_of = f"; the figures are those of {held[-1]}" if len(held) > 1 and FIGURE.search(text) else ""
        told = text[0].upper() + text[1:].removesuffix(".")
        yield f"{told} ({noun} {spans(held)}, {len(held)} of {run.steps}{as_of})."


def _loss_trend(run: RunData) -> Iterator[str]:
    ends = run.ends("loss")
    # A policy loss is about zero by construction, whatever is learnt.
    if ends is None or len(run.series("loss")) < ENOUGH_STEPS or run.is_rl:
        return
    first, last = ends
    if abs(last - first) < 0.02 * abs(first):
        yield (
            f"The loss hardly moved ({first:.3g} to {last:.3g}): the learning rate may be too low, "
            "or the model already knows these data."
        )


def _overlap(run: RunData) -> Iterator[str]:
    evaluation = run.data.get("evaluation")
    if run.held_out == "held-out" or not isinstance(evaluation, dict):
        return
    seen, of = plain(evaluation["rows_also_trained"]), plain(evaluation.get("rows_kept"))
    yield f"{seen} of {of} {run.noun} of the evaluation have a prompt that is trained on too: it is not held out."


def _data(run: RunData) -> Iterator[str]:
    read, kept, truncated, over_long, empty, equal = (
        finite(run.data.get(f"rows_{name}")) or 0.0
        for name in ("read", "kept", "truncated", "over_long", "empty", "equal")
    )
    longest = "--prompt_max_len" if run.is_rl else "--max_len"
    if kept and truncated / kept > 0.1:
        share = percent(truncated / kept, 0)
        yield f"{share} of the {run.noun} were cut to the longest allowed length: consider a larger {longest}."
    if read and over_long / read > 0.1:
        share = percent(over_long / read, 0)
        yield f"{share} of the {run.noun} were left out as too long: consider a larger {longest}."
    if read and empty / read > 0.1:
        share = percent(empty / read, 0)
        yield f"{share} of the {run.noun} were left out because there is nothing to learn in them."
    if kept and equal / kept > 0.05:
        share = percent(equal / kept, 0)
        yield f"In {share} of the pairs chosen and rejected are the same: nothing can be learnt from them."
