"""What RL achieved, in a sentence and in a few figures: for the top of a report, and for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from trimtab.report.numbers import duration, percent, plural, short_number, sparkline
from trimtab.report.read import Point, Run
from trimtab.report.rl_figures import PASS, best_of, is_binary

SUCCESS = "eval_pass_1"


@dataclass(frozen=True)
class Success:
    """What the policy scores on prompts of an evaluation, from before training (step 0) to the end."""

    points: list[Point]
    is_share: bool = True
    """Every score was 0 or 1, so that their mean is a rate of success; others are just scores."""
    which: str = "held-out"
    bounds: tuple[float, float] | None = None
    """The 95 % interval of the last one."""

    @property
    def name(self) -> str:
        return f"{self.which} {'success' if self.is_share else 'score'}"

    @property
    def interval(self) -> str:
        return " to ".join(map(self.shown, self.bounds)) if self.bounds else ""

    @property
    def before(self) -> float:
        return self.points[0][1]

    @property
    def after(self) -> float:
        return self.points[-1][1]

    def shown(self, value: float) -> str:
        return percent(value) if self.is_share else short_number(value)

    def picture(self) -> str:
        """One line for a terminal: 27 % ▂▄▆▇ 94 %."""
        values = [value for _, value in self.points]
        low, high = (0.0, 1.0) if self.is_share else (min(values), max(values))
        curve = sparkline(values, low, high) if high > low else "…"
        return f"{self.shown(self.before)} {curve} {self.shown(self.after)}"


def success_of(run: Run) -> Success | None:
    """None where nothing was evaluated."""
    points = run.series(SUCCESS)
    if not points:
        return None
    low, high = run.last(f"{SUCCESS}_low"), run.last(f"{SUCCESS}_high")
    return Success(points, is_binary(run), run.held_out, None if low is None or high is None else (low, high))


def summary(run: Run) -> str:
    """One or two sentences: success, reward, how far from the reference, time."""
    success, reward = success_of(run), run.change("reward")
    if not run.steps:
        return f"Before training, {success.name} is {success.shown(success.before)}." if success else ""
    told = []
    if success is not None and len(success.points) > 1:
        change = in_words(success.shown(success.before), success.shown(success.after), success.after - success.before)
        told.append(f"{success.name} {change}{f' (95 % interval {success.interval})' if success.interval else ''}")
    elif success is not None:
        told.append(f"{success.name} is {success.shown(success.after)}")
    teacher = run.ends("teacher_kl")
    if teacher is not None:
        told.append(f"the KL to the teacher {change_in_words(short_number, *teacher)}")
    if reward is not None and not run.options.get("replay") and (teacher is None or any(reward)):
        window = run.tenth("reward")
        over = f" (mean of the last {window})" if window > 1 else ""
        told.append(f"the mean reward {change_in_words(short_number, *reward)}{over}")
    first = " and ".join(told) or "training went on"
    first = f"{first[0].upper()}{first[1:]} in {plural(run.steps, run.unit)}"
    seconds = run.total("seconds")
    typical = [value for _, value in run.series("seconds")]
    spent = f" and {duration(seconds)} ({duration(median(typical))} a typical {run.unit})" if seconds > 0 else ""
    kl = run.ends("kl")
    moved = f" At the end the policy is {short_number(kl[1])} nats a token from its reference." if kl else ""
    recorded = " Rewards and answers are the recording's, not this model's." if run.options.get("replay") else ""
    return f"{first}{spent}.{moved}{recorded}"


def achieved(run: Run) -> list[tuple[str, str, str]]:
    """The figures one asks for first: name, value, and what it was at the beginning."""
    figures = []
    success, reward = success_of(run), run.change("reward")
    if success is not None:
        before = f"from {success.shown(success.before)}" if len(success.points) > 1 else ""
        interval = f"95 %: {success.interval}" if success.interval else ""
        figures.append((success.name, success.shown(success.after), "; ".join(filter(None, (before, interval)))))
    for name in run.metrics:
        match = PASS.fullmatch(name)
        if success is not None and match and match["source"] is None and int(match["samples"]) > 1:
            first, *later = [success.shown(value) for _, value in run.series(name)]
            figures.append(
                (best_of(int(match["samples"])), later[-1] if later else first, f"from {first}" if later else "")
            )
    if reward is not None:
        figures.append(("mean reward", short_number(reward[1]), f"from {short_number(reward[0])} at first"))
    ages = [value for _, value in run.series("age")]
    if ages:
        largest = max((value for _, value in run.series("age_max")), default=max(ages))
        figures.append(("mean age in updates", short_number(fmean(ages)), f"at most {largest:.0f}{_bound(run)}"))
    return figures


def _bound(run: Run) -> str:
    bound = run.options.get("async_staleness")
    return f"; bound: {bound}" if isinstance(bound, int) else ""


def change_in_words(shown: Callable[[float], str], before: float, after: float) -> str:
    return in_words(shown(before), shown(after), after - before)


def in_words(before: str, after: str, change: float) -> str:
    if before == after:
        return f"stayed at {after}"
    return f"{'rose' if change > 0 else 'fell'} from {before} to {after}"
