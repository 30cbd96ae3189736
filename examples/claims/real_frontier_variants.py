"""Other settings of RePULSe beside the lines of the methods, one by one and together, and how proposals learnt.

A line goes through the points of a seed and begins with the model before training, which every line would reach with
a large enough weight of the KL. A setting is held against it where both have the same reward, or the same KL, for the
same prompts; a little beyond its end it is taken further, and else nothing is known beside it. Settings that are held
against one line share its noise: what they all have in common is told apart from what each has of its own.
"""

import numpy as np
from estimates import at
from real_frontier_answers import Answers, bounds, drawn
from real_frontier_methods import BEFORE, VARIANTS

LINES = ("REINFORCE", "RePULSe")
BEYOND = 0.1  # of the length of a line
NAMES = {"reward": "reward", "kl": "KL"}


class Settings:
    """Those of a split that lines are held against, with RePULSe as it is where it has their weight and seed."""

    def __init__(self, runs: list[Answers], threshold: float):
        cells = {(run.weight, run.seed) for run in runs if run.method in VARIANTS}
        chosen = [r.method in VARIANTS or (r.method == "RePULSe" and (r.weight, r.seed) in cells) for r in runs]
        self.runs = [run for run, one in zip(runs, chosen) if one] if cells else []
        draws = drawn(len(runs[0].rewards)) if self.runs else []
        self._all = [(run, [run.figures(threshold, prompts) for prompts in draws]) for run in runs]
        self.figures = [found for (_, found), one in zip(self._all, chosen) if one]

    def differences(self, method: str, what: str) -> np.ndarray:
        """How much rarer than on the line bad answers are at the same place, in decades: [settings, draws], the first
        draw is the prompts themselves. Not a number where the line is not known."""
        return np.array([self._less(run, found, method, what) for run, found in zip(self.runs, self.figures)])

    def _less(self, run: Answers, found: list[dict[str, float]], method: str, what: str) -> list[float]:
        of_line = ((BEFORE, 1), (method, run.seed))  # the model before training is measured once
        line = [other for one, other in self._all if (one.method, one.seed) in of_line and one is not run]
        if len(line) < 2:
            return [np.nan] * len(found)
        differences = []
        for draw, one in enumerate(found):
            points = [point[draw] for point in line]
            there = at(one[what], [p[what] for p in points], [p["log_bad"] for p in points], BEYOND)
            differences.append(np.nan if there is None else one["log_bad"] - there)
        return differences


def table(runs: list[Answers], threshold: float) -> Settings:
    settings = Settings(runs, threshold)
    if not settings.runs:
        return settings
    places = [(line, what) for line in LINES for what in NAMES]
    heads = [f"log10 P(bad) less {line}'s at this {NAMES[what]}" for line, what in places]
    print(f"\n| setting | KL weight | seed | reward | KL | bad answers | CVaR, worst 1 % | {' | '.join(heads)} |")
    print("|---" * (7 + len(heads)) + "|")
    less = [settings.differences(line, what) for line, what in places]
    for number, (run, found) in enumerate(zip(settings.runs, settings.figures)):
        cells = [interval([one[name] for one in found]) for name in ("reward", "kl", "cvar")]
        cells.insert(2, run.bad(threshold))
        cells += [told(differences[number]) for differences in less]
        print(f"| {run.method} | {run.weight:g} | {run.seed} | {' | '.join(cells)} |")
    return settings


def is_known(differences: np.ndarray) -> bool:
    """Beside the line's end, where most draws are beside it, nothing is."""
    return not np.isnan(differences[0]) and 2 * np.isnan(differences).sum() < len(differences)


def told(differences: np.ndarray) -> str:
    return interval(differences[~np.isnan(differences)].tolist()) if is_known(differences) else "–"


def together(settings: Settings, other: Settings | None) -> None:
    """All of them against REINFORCE's lines: their mean, how much of the noise they share, and whether they come in the
    same order with the questions of the other split."""
    heads = ["at this", "mean", "deviation that they share", "of one's own, median", "between them",
             "deviations of an interval for all at once", "below 0 by it"]  # fmt: skip
    heads += ["Spearman with the other split"] if other else []
    print(f"\nAll {len(settings.runs)} less REINFORCE's line together; deviations are those of new prompts:\n")
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for what, name in NAMES.items():
        less = settings.differences("REINFORCE", what)
        sure = np.array([is_known(one) for one in less])
        cells = summary(less[sure]) if sure.sum() > 1 else ["–"] * (len(heads) - 1)
        if other and sure.sum() > 1:
            elsewhere = other.differences("REINFORCE", what)
            sure &= ~np.isnan(elsewhere[:, 0])
            cells.append(f"{spearman(less[sure, 0], elsewhere[sure, 0]):.2f}" if sure.sum() > 2 else "–")
        print(f"| {name} | {' | '.join(cells)} |")


def summary(less: np.ndarray) -> list[str]:
    """Of differences [settings, draws]."""
    mean = np.nanmean(less, axis=0)
    found, draws = less[:, 0], less[:, 1:]
    own = np.nanstd(draws - mean[1:], axis=1)
    deviations = np.nanstd(draws, axis=1)
    # So wide that of 20 draws 19 have all their settings within.
    wide = float(np.quantile(np.nanmax(np.abs(draws - found[:, None]) / deviations[:, None], axis=0), 0.95))
    below = int((found + wide * deviations < 0).sum())
    noise = [f"{value:.3f}" for value in (mean[1:].std(), np.median(own), found.std(ddof=1))]
    return [interval(mean.tolist()), *noise, f"{wide:.2f}", f"{below} of {len(less)}"]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of the places in order."""
    return float(np.corrcoef(*(np.argsort(np.argsort(values)) for values in (one, other)))[0, 1])


def interval(values: list[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*bounds(values))


def proposals(runs: list[Answers], threshold: float) -> None:
    """How proposals learnt, over the parts of their trainings; beside it what the policy's own held-out answers come to
    as a proposal, weighed by exp(beta r) within a group: a proposal must do better to be worth its answers."""
    learnt = [run for run in runs if "proposal_reward" in run.course]
    if not learnt:
        return
    print("\nBy parts of the training, then the policy's own answers, weighed by exp(beta r) in groups:\n")
    print("| proposal of | KL weight | seed | updates | policy's reward | proposal's reward | its bad answers, % | "
          "effective samples | own: effective samples | own: reward | own: bad answers, % |")  # fmt: skip
    print("|---" * 11 + "|")
    for run in learnt:
        told = [of_parts(run, "reward", "{:.2f}"), of_parts(run, "proposal_reward", "{:.2f}"),
                of_parts(run, "proposal_bad_share", "{:.1f}", 100),
                of_parts(run, "proposal_effective_samples", "{:.2f}")]  # fmt: skip
        told += [f"{value:.2f}" for value in weighed(run, threshold)]
        print(f"| {run.method} | {run.weight:g} | {run.seed} | {run.updates} | {' | '.join(told)} |")


def of_parts(run: Answers, name: str, form: str, scale: float = 1) -> str:
    return ", ".join(form.format(scale * value) for value in run.course.get(name, [])) or "–"


def weighed(run: Answers, threshold: float) -> tuple[float, float, float]:
    """Effective samples of a group, mean reward, and percent of bad answers."""
    groups = run.rewards.reshape(-1, run.group)
    weights = np.exp(run.beta * (groups - groups.min(1, keepdims=True)))
    weights /= weights.sum(1, keepdims=True)
    effective = float((1 / (weights**2).sum(1)).mean())
    means = [float((weights * values).sum(1).mean()) for values in (groups, groups < threshold)]
    return effective, means[0], 100 * means[1]


if __name__ == "__main__":
    raise SystemExit("python examples/claims/real_frontier.py table")
