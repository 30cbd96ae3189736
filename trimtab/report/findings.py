"""What deserves a second look in a run, in words. Each rule is one small function of the run.

What only some jobs can get wrong is in objective_findings.py and rl_findings.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from trimtab.report.numbers import percent
from trimtab.report.objective_findings import RULES as OBJECTIVE_RULES
from trimtab.report.read import Run, finite
from trimtab.report.rl_findings import RULES as RL_RULES

ENOUGH_STEPS = 20
"""Below this many steps a trend is noise."""


def findings(run: Run) -> list[str]:
    """Sentences about the run, the gravest first; empty when nothing is unusual."""
    rules = (_progress, _not_finite, _skipped, *RL_RULES, _loss_trend, _evaluation, *OBJECTIVE_RULES, _gradient, _data)
    return [sentence for rule in rules for sentence in rule(run)] + run.problems


def loss_ends(run: Run) -> tuple[float, float] | None:
    """Mean loss over the first and over the last tenth of the steps."""
    return run.ends("loss")


def _progress(run: Run) -> Iterator[str]:
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


def _not_finite(run: Run) -> Iterator[str]:
    for name, words in (("loss", "loss"), ("grad_norm", "gradient norm"), ("eval_loss", "evaluation loss")):
        steps = run.non_finite_steps(name)
        if steps:
            yield f"The {words} was not a finite number at {_steps(steps)}."


def _skipped(run: Run) -> Iterator[str]:
    skipped = int(max((value for _, value in run.series("skipped_steps")), default=0))
    if skipped:
        was = "step was" if skipped == 1 else "steps were"
        yield (
            f"{skipped} optimiser {was} skipped because the loss or a gradient was not finite. "
            "A lower learning rate or a look at those rows may help."
        )


def _loss_trend(run: Run) -> Iterator[str]:
    ends = loss_ends(run)
    # A policy loss is about zero by construction, whatever is learnt.
    if ends is None or len(run.series("loss")) < ENOUGH_STEPS or run.is_rl:
        return
    first, last = ends
    if last > first + 0.1 * abs(first):
        yield f"The loss rose from {first:.3g} to {last:.3g}: the learning rate may be too high."
    elif last > first - 0.02 * abs(first):
        yield (
            f"The loss hardly moved ({first:.3g} to {last:.3g}): the learning rate may be too low, "
            "or the model already knows these data."
        )


def _evaluation(run: Run) -> Iterator[str]:
    points = run.series("eval_loss")
    if len(points) < 2:
        return
    best_step, best = min(points, key=lambda point: point[1])
    last = points[-1][1]
    if last <= best + max(0.05 * abs(best), 1e-3):
        return
    told = f"The evaluation loss was lowest at step {best_step} ({best:.3g}) and ended at {last:.3g}"
    losses = run.series("loss")
    around = [value for step, value in losses if abs(step - best_step) <= len(losses) / 20]
    ends = loss_ends(run)
    if ends is not None and around and ends[1] < fmean(around):
        yield (
            f"{told}, while the training loss went on falling: the model began to memorise the training rows. "
            "Fewer epochs, a lower learning rate or more data may help."
        )
    else:
        yield f"{told}: the later steps did not help on new data."


def _gradient(run: Run) -> Iterator[str]:
    points = run.series("grad_norm")
    if len(points) < ENOUGH_STEPS:
        return
    # The first steps of a fresh model are always steep; a spike counts only after them.
    later = points[len(points) // 10 :]
    typical = median(value for _, value in later)
    step, highest = max(later, key=lambda point: point[1])
    if typical > 0 and highest > 20 * typical:
        yield f"The gradient norm jumped to {highest:.3g} at step {step}, against {typical:.3g} on a typical step."


def _data(run: Run) -> Iterator[str]:
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


def _steps(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    shown = ", ".join(map(str, steps[:5]))
    return f"{len(steps)} steps ({shown}{', ...' if len(steps) > 5 else ''})"
