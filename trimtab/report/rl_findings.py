"""What deserves a second look in an RL run, in words: what only its end shows."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.report.read import Run
from trimtab.report.rl_summary import success_of

ENOUGH_ITERATIONS = 20
"""Below this many iterations a trend is noise."""


def _success(run: Run) -> Iterator[str]:
    success = success_of(run)
    if not run.is_rl or success is None or len(success.points) < 2 or run.steps < ENOUGH_ITERATIONS:
        return
    # A fall is an alarm of the run itself.
    if success.after <= success.before and not (success.is_share and success.before == 1):
        before, after = success.shown(success.before), success.shown(success.after)
        yield f"{success.name.capitalize()} did not rise: {before} before training, {after} at the end."


def _reward(run: Run) -> Iterator[str]:
    ends = run.ends("reward")
    if not run.is_rl or ends is None or len(run.series("reward")) < ENOUGH_ITERATIONS:
        return
    spread = run.ends("reward_std")
    if ends[1] < ends[0] - 0.1 * (spread[0] if spread else abs(ends[0])):
        yield f"The mean reward fell from {ends[0]:.3g} to {ends[1]:.3g}."


RULES = (_success, _reward)
