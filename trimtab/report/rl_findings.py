"""What deserves a second look in an RL run, in words: what only its end shows."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.report.numbers import percent, short_number
from trimtab.report.read import Run
from trimtab.report.rl_summary import success_of

ENOUGH_ITERATIONS = 20
"""Below this many iterations a trend is noise."""
MUCH_WAITING, MUCH_READ_AGAIN = 0.5, 0.5
"""Of the time; of the tokens that were trained."""


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


def _outliving(run: Run) -> Iterator[str]:
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


RULES = (_success, _reward, _outliving)
