"""Other settings of RePULSe beside the lines of the methods, and how proposals learnt.

A line goes through the points of a seed and begins with the model before training, which every line would reach with
a large enough weight of the KL. A setting is held against it where both have the same reward, or the same KL, for the
same prompts; beside the line nothing is known.
"""

import numpy as np
from estimates import at
from real_frontier_answers import Answers, bounds, drawn
from real_frontier_methods import BEFORE, VARIANTS

LINES = ("REINFORCE", "RePULSe")


def table(runs: list[Answers], threshold: float) -> None:
    others = [run for run in runs if run.method in VARIANTS]
    if not others:
        return
    heads = [f"log10 P(bad) less {line}'s at this {what}" for line in LINES for what in ("reward", "KL")]
    print(f"\n| setting | KL weight | seed | reward | KL | bad answers | CVaR, worst 1 % | {' | '.join(heads)} |")
    print("|---" * (7 + len(heads)) + "|")
    draws = drawn(len(runs[0].rewards))
    figures = [[run.figures(threshold, prompts) for prompts in draws] for run in runs]
    for run, found in zip(runs, figures):
        if run not in others:
            continue
        cells = [interval([one[name] for one in found]) for name in ("reward", "kl", "cvar")]
        cells.insert(2, run.bad(threshold))
        for method in LINES:
            of_line = ((BEFORE, 1), (method, run.seed))  # the model before training is measured once
            line = [other for one, other in zip(runs, figures) if (one.method, one.seed) in of_line]
            cells += [less(found, line, what) for what in ("reward", "kl")]
        print(f"| {run.method} | {run.weight:g} | {run.seed} | {' | '.join(cells)} |")


def less(found: list[dict[str, float]], line: list[list[dict[str, float]]], what: str) -> str:
    """How much rarer than on the line bad answers are at the same place, draw by draw."""
    differences = []
    for draw, one in enumerate(found):
        points = [point[draw] for point in line]
        there = at(one[what], [p[what] for p in points], [p["log_bad"] for p in points]) if len(points) > 1 else None
        if there is not None:
            differences.append(one["log_bad"] - there)
        elif draw == 0:
            return "–"
    return (
        interval(differences) if 2 * len(differences) > len(found) else "–"
    )  # at the line's end most draws are beside it


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
