"""Alarms on the metrics of a running job, and the messages of a run that ends badly.

Alarms depend on the rows of metrics.jsonl alone, so a resumed run that replays its earlier rows raises the same alarms
as an uninterrupted one. Alarms that only RL needs are in rl/checks.py. The process that launches a run imports this
file too, so heavy imports stay inside functions.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median, pstdev

from trimtab.config.training_options import CheckpointOptions

LATELY = 20  # steps
FEW, ENOUGH = 4, 10  # steps needed for a mean; steps needed to separate a rise from the noise of single batches
RISE, LEAST_RISE, NOISE = 0.5, 0.1, 4.0  # fraction of the first loss; nats, for a first loss near 0; deviations
MUCH_RISE = 10.0  # times the first loss: an alarm however noisy the loss is
JUMP, FAR, GROWTH = 20.0, 10.0, 100.0  # norm / recent median; norm / first median; recent median / first median
FIRST_NORMS = 5
MANY_PAIRS = 100
WORSE = 0.05  # of the lowest evaluation loss


class MetricAlarms:
    """Rules over the rows of metrics that notice divergence, overfitting and reversed preferences."""

    def __init__(self) -> None:
        self._steps = 0
        self._first_loss: float | None = None
        self._losses: deque[float] = deque(maxlen=LATELY)
        self._first_norms: list[float] = []
        self._norms: deque[float] = deque(maxlen=LATELY)
        self._pairs: deque[tuple[float, float]] = deque(maxlen=LATELY)
        self._lowest: tuple[float, int, float] | None = None  # evaluation loss, its step, training loss at that step
        self._best: tuple[float, float, int] | None = None  # evaluation reward, its lower bound, its step

    def see(self, row: dict) -> list[str]:
        """The alarms of the next row."""
        self._steps += row["step"] > 0
        rules = (self._not_finite, self._loss, self._gradient, self._accuracy, self._evaluation, self._reward)
        return [alarm for rule in rules for alarm in rule(row)]

    def _not_finite(self, row: dict) -> Iterator[str]:
        for name, words in (("loss", "loss"), ("grad_norm", "gradient norm"), ("eval_loss", "evaluation loss")):
            if name in row and _finite(row, name) is None:
                yield f"the {words} is not a finite number: lower the learning rate, or look at these rows"
                return

    def _loss(self, row: dict) -> Iterator[str]:
        loss = _finite(row, "loss")
        # A policy loss is about zero by construction, so it says nothing about learning.
        if loss is None or "reward" in row:
            return
        if self._first_loss is None:
            self._first_loss = loss
            return
        self._losses.append(loss)
        first, mean, noise = self._first_loss, fmean(self._losses), pstdev(self._losses)
        steps, rise = len(self._losses), mean - first
        plain = steps >= FEW and rise > MUCH_RISE * abs(first) + 1
        steady = steps >= ENOUGH and rise > max(RISE * abs(first), LEAST_RISE, NOISE * noise)
        if plain or steady:
            yield (
                f"the loss began at {first:.3g} and is {mean:.3g}, mean of the last {steps} steps: training makes "
                "the model worse; lower the learning rate"
            )

    def _gradient(self, row: dict) -> Iterator[str]:
        norm = _finite(row, "grad_norm")
        if not norm:
            return
        if len(self._first_norms) < FIRST_NORMS:
            self._first_norms.append(norm)
        first, usual = median(self._first_norms), median(self._norms or [norm])
        if len(self._norms) == LATELY:
            if norm > max(JUMP * usual, FAR * first):
                yield f"the gradient norm jumped to {norm:.3g}, against {usual:.3g} on a typical step"
            elif usual > GROWTH * first and "reward" not in row:
                yield f"the gradient norm grew from {first:.3g} to {usual:.3g}: lower the learning rate"
        self._norms.append(norm)

    def _accuracy(self, row: dict) -> Iterator[str]:
        from trimtab.evaluate.tail_risk import share  # numpy

        accuracy, pairs = _finite(row, "accuracy"), _finite(row, "samples")
        # Only preference pairs have a chance level of one half. While both rewards are equal, no pair counts as right.
        if accuracy is None or not pairs or row.get("chosen_reward") in (None, row.get("rejected_reward")):
            return
        if self._steps <= LATELY:
            return
        self._pairs.append((accuracy * pairs, pairs))
        number = sum(pairs for _, pairs in self._pairs)
        found = share(min(sum(right for right, _ in self._pairs), number), number)
        if number >= MANY_PAIRS and found.high < 0.5:
            yield (
                f"the accuracy on the last {number:.0f} pairs is {found.value:.0%}, below chance: lower the learning "
                "rate, and look whether chosen and rejected answers are exchanged"
            )

    def _evaluation(self, row: dict) -> Iterator[str]:
        loss = _finite(row, "eval_loss")
        if loss is None:
            return
        training = fmean(self._losses) if self._losses else math.inf
        if self._lowest is None or loss < self._lowest[0]:
            self._lowest = loss, row["step"], training
            return
        lowest, step, then = self._lowest
        if loss > lowest + max(WORSE * abs(lowest), 1e-3):
            message = f"the evaluation loss was lowest at step {step} ({lowest:.3g}) and is {loss:.3g}"
            memorised = (
                ", while the training loss goes on falling: the model memorises its rows; train for fewer epochs"
            )
            yield message + (memorised if training < then else ": the later steps did not help on new data")

    def _reward(self, row: dict) -> Iterator[str]:
        reward, low, high = (_finite(row, f"eval_reward{end}") for end in ("", "_low", "_high"))
        if reward is None or low is None or high is None:
            return
        if self._best is None or reward > self._best[0]:
            self._best = reward, low, row["step"]
        elif high < self._best[1]:
            best, _, step = self._best
            when = f"at iteration {step}" if step else "before training"
            yield (
                f"the evaluation reward was highest {when} ({best:.3g}) and is {reward:.3g}: the later "
                "iterations did harm; raise --init_kl_coef or lower the learning rate"
            )


def _finite(row: dict, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---- lines for a run that ends badly, shared by supervised and RL runs


LATEST = "latest"  # the file that names the newest checkpoint of its folder

Mark = tuple[str, int]


def newest_checkpoint_mark(options: CheckpointOptions) -> Mark | None:
    """Name and modification time of the newest checkpoint in the folder of `options`; None without one.

    The time comes from the file server's clock, so two marks can be compared but not set against this machine's clock.
    Nothing is changed: the folder may belong to another run.
    """
    latest = Path(options.checkpoint_folder) / LATEST
    with suppress(OSError):
        return latest.read_text(), latest.stat().st_mtime_ns
    return None


def resume_line(saved: Path | None) -> str:
    """How to resume from `saved`, the checkpoint written when the run stopped."""
    if saved is None:
        return "no checkpoint was written, as --disable_ds_ckpt asks"
    return f"checkpoint saved in {saved}; add --load_checkpoint to go on"


def last_checkpoint_line(last: Path | None) -> str:
    """How to resume a run that could not write a checkpoint when it stopped; `last`: the newest one it has."""
    if last is None:
        return "this run has no checkpoint to go on from"
    return f"the last checkpoint is {last}; add --load_checkpoint to go on"


def not_finite_line(when: str, last: Path | None) -> str:
    """Message for weights that are not finite; `last`: the newest checkpoint (only finite weights are ever saved)."""
    go_on = f"the last checkpoint is {last}; add --load_checkpoint to go on from there" if last else "start again"
    return f"the weights or Adam's moments are not finite {when}, so they were not saved; {go_on}, more slowly"


def diverged_line(count: int, what: str, folder: Path) -> str:
    return (
        f"loss or gradient was not finite in the last {count} {what}, which therefore taught nothing; the model as it "
        f"was before them is in {folder}; lower the learning rate, or look at the last of the data"
    )
