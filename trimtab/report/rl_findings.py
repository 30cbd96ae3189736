"""What deserves a second look in an RL run, in words: what only its end shows."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.report.numbers import wilson
from trimtab.report.read import Run, finite
from trimtab.report.rl_summary import success_of

ENOUGH_ITERATIONS = 20
"""Below this many iterations a trend is noise."""
NOTABLE = 0.05
"""A fall in success that is worth a sentence."""


def _success(run: Run) -> Iterator[str]:
    success = success_of(run)
    if not run.is_rl or success is None or len(success.points) < 2 or not success.is_share:
        return
    step, best = max(success.points, key=lambda point: point[1])
    when = f"at {run.unit} {step}" if step > 0 else "before training"
    if success.after < best - max(NOTABLE, _noise(run, min(best, 1.0))):
        yield (
            f"Held-out success was highest {when} ({success.shown(best)}) and ended at "
            f"{success.shown(success.after)}: the later {run.unit}s did harm. A larger --init_kl_coef or a lower "
            "learning rate may help."
        )
    elif run.steps >= ENOUGH_ITERATIONS and success.after <= success.before < 1:
        before, after = success.shown(success.before), success.shown(success.after)
        yield f"Held-out success did not rise: {before} before training, {after} at the end."


def _noise(run: Run, share: float) -> float:
    """How far below this share another draw of as many prompts may come out."""
    evaluation = run.data.get("evaluation")
    prompts = finite(evaluation.get("rows_kept")) if isinstance(evaluation, dict) else None
    return share - wilson(share * prompts, prompts)[0] if prompts and prompts >= 1 else 0.0


def _reward(run: Run) -> Iterator[str]:
    ends = run.ends("reward")
    if not run.is_rl or ends is None or len(run.series("reward")) < ENOUGH_ITERATIONS:
        return
    spread = run.ends("reward_std")
    if ends[1] < ends[0] - 0.1 * (spread[0] if spread else abs(ends[0])):
        yield f"The mean reward fell from {ends[0]:.3g} to {ends[1]:.3g}."


RULES = (_success, _reward)
