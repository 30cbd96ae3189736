"""What real_frontier.py found: reward, KL, P(bad) and CVaR with intervals, methods where they match, and attacks.

Intervals speak of new prompts: prompts are drawn anew, the same ones for both methods of a difference. They do not
speak of new trainings, so that beside a difference stands what each seed says.
"""

from itertools import product
from pathlib import Path

import numpy as np
import real_frontier_variants as variants
from estimates import at, shared_range
from real_frontier_answers import DRAWS, Answers, bounds, drawn, measured, percent
from real_frontier_methods import BEFORE, METHODS, VARIANTS

from trimtab.evaluate.tail_risk import share

PAIR = ("REINFORCE", "RePULSe")
ALIKE = 0.1  # difference of mean rewards
COLOURS = {"REINFORCE": "#4c72b0", "RePULSe": "#c44e52", "base proposal": "#dd8452", BEFORE: "#666666"}
FREE = (2, 3, 4, 5, 8, 9, 10, 11, 14, 16, 17, 18)  # of tab20's colours: not like those of the methods


def table(rows: list[dict], split: str, threshold: float, folder: Path) -> None:
    everything = measured(rows, split)
    runs = [run for run in everything if run.method in (*METHODS, BEFORE)]
    draws = drawn(len(runs[0].rewards))
    figures = [[run.figures(threshold, prompts) for prompts in draws] for run in runs]
    prompts, answers = len(runs[0].rewards), runs[0].rewards.size
    print(f"{split}: {prompts} prompts, {answers:,} answers of each model; bad: < {threshold:g}\n")
    print("| method | KL weight | seed | reward | KL | bad answers | CVaR, worst 1 % |\n|---|---|---|---|---|---|---|")
    for run, found in zip(runs, figures):
        columns = [bounds([one[name] for one in found]) for name in ("reward", "kl", "cvar")]
        reward, kl, cvar = (f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in columns)
        print(f"| {run.method} | {run.weight:g} | {run.seed} | {reward} | {kl} | {run.bad(threshold)} | {cvar} |")
    for what in ("reward", "kl"):
        differences(runs, figures, what)
    settings = variants.table(everything, threshold)
    if len(settings.runs) > 2:
        other = {"reported": "chosen_by", "chosen_by": "reported"}.get(split)
        variants.together(settings, variants.Settings(measured(rows, other), threshold) if other else None)
    variants.proposals(everything, threshold)
    attacks(rows, threshold)


def differences(runs: list[Answers], figures: list[list[dict[str, float]]], what: str) -> None:
    """RePULSe less REINFORCE in the range that both reach, on lines through the points of a seed; mean over seeds."""
    lines = []
    for seed in sorted({run.seed for run in runs}):
        own = {
            method: [f for run, f in zip(runs, figures) if (run.method, run.seed) == (method, seed)] for method in PAIR
        }
        if all(len(line) > 1 for line in own.values()) and difference(list(own.values()), what, "cvar", 0.5, 0):
            lines.append(list(own.values()))
    if not lines:
        print(f"\nno common {what}: RePULSe and REINFORCE cannot be compared at the same one")
        return
    print(f"\n| at the same {what} | log10 of RePULSe's P(bad) over REINFORCE's | CVaR: RePULSe less REINFORCE |")
    print("|---|---|---|")
    for part in (0.25, 0.5, 0.75):
        places, cells = [], []
        for name in ("log_bad", "cvar"):
            found = [[difference(both, what, name, part, draw) for both in lines] for draw in range(1 + DRAWS)]
            kept = [[one[1] for one in seeds if one] for seeds in found if all(seeds)]
            places = [one[0] for one in found[0] if one]
            told = "{:.2f} ({:.2f} to {:.2f})".format(*bounds([float(np.mean(seeds)) for seeds in kept]))
            cells.append(told + ("; " + ", ".join(f"{one:.2f}" for one in kept[0]) if len(lines) > 1 else ""))
        print(f"| {np.mean(places):.2f} | {cells[0]} | {cells[1]} |")


def difference(
    both: list[list[list[dict[str, float]]]], what: str, name: str, part: float, draw: int
) -> tuple[float, float] | None:
    """At this part of the range that both lines share with these prompts: the place, and how much higher the second is.

    The range is that of the draw, since other prompts move the rewards of both.
    """
    points = [[found[draw] for found in line] for line in both]
    shared = shared_range(*([point[what] for point in line] for line in points))
    if shared is None:
        return None
    place = shared[0] + part * (shared[1] - shared[0])
    heights = [at(place, [p[what] for p in line], [p[name] for p in line]) for line in points]
    assert heights[0] is not None and heights[1] is not None, "within the range of both"
    return place, heights[1] - heights[0]


# ---- attacks


def alike(rows: list[dict]) -> list[str]:
    """A run of each method, of one seed: of the pairs whose rewards differ by no more than 0.1 the one that went
    furthest, else the closest; by prompts that are not reported."""
    runs = measured(rows, "chosen_by")
    found = []
    for one, other in product(*([run for run in runs if run.method == method] for method in PAIR)):
        if one.seed == other.seed:
            rewards = [float(run.rewards.mean()) for run in (one, other)]
            found.append((max(ALIKE, abs(rewards[0] - rewards[1])), -min(rewards), (one, other)))
    if not found:
        raise SystemExit(
            "results.jsonl: no REINFORCE and RePULSe of one seed; real_frontier.py run, or give --attacked"
        )
    return [f"{run.method} {run.weight:g} {run.seed}" for run in min(found, key=lambda pair: pair[:2])[2]]


def attacks(rows: list[dict], threshold: float) -> None:
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if "attacked" in row:
            found.setdefault((row["attacked"], row["kl_weight"], row["seed"]), {})[row["goal"]] = row
    if not found:
        return
    print("\n| attacked | goals | stopped early | with a bad reply before | after | bad replies before | after | "
          "mean reward before, after |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for (method, weight, seed), goals in found.items():
        events = {when: np.array([row[when] for row in goals.values()]) < threshold for when in ("before", "after")}
        broken = [counted(bad.any(1)) for bad in events.values()]
        early = sum(row["stopped_early"] for row in goals.values())
        rewards = [f"{np.mean([np.mean(row[when]) for row in goals.values()]):.2f}" for when in events]
        cells = [len(goals), early, *broken, *map(percent, events.values()), ", ".join(rewards)]
        print(f"| {method}, {weight:g}, seed {seed} | {' | '.join(map(str, cells))} |")
    (first, one), *others = found.items()
    for second, other in others:
        goals = sorted(one.keys() & other.keys())
        bad = [np.array([row[goal]["after"] for goal in goals]) < threshold for row in (one, other)]
        for name, paired in (
            ("goals with a bad reply", 1.0 * bad[1].any(1) - bad[0].any(1)),
            ("bad replies", bad[1].mean(1) - bad[0].mean(1)),
        ):
            value, low, high = bounds([100 * float(paired[prompts].mean()) for prompts in drawn(len(goals))])
            told = f"{value:.1f} points ({low:.1f} to {high:.1f})"
            print(f"\n{second[0]} less {first[0]}, {name} after the attack, the same {len(goals)} goals: {told}")


def counted(broke: np.ndarray) -> str:
    found = share(int(broke.sum()), len(broke))
    return f"{broke.sum()} ({100 * found.low:.0f} to {100 * found.high:.0f} %)"


# ---- a figure


def draw(rows: list[dict], split: str, threshold: float, folder: Path) -> None:
    """Methods as lines, a seed each; with other settings as points beside them, lines begin with the model before
    training, as where they are held against each other."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    runs = measured(rows, split)
    draws = drawn(len(runs[0].rewards))
    others = list(dict.fromkeys(run.method for run in runs if run.method in VARIANTS))
    colours = COLOURS | {name: colormaps["tab20"](FREE[n % len(FREE)]) for n, name in enumerate(others)}
    figure = Figure(figsize=(12.5 if others else 10, 7.6), layout="constrained")
    panels = figure.subplots(2, 2)
    names = {"log_bad": f"log10 P(reward < {threshold:g})", "cvar": "mean reward of the worst 1 %",
             "reward": "mean reward", "kl": "KL of an answer, nats"}  # fmt: skip
    figures = [[run.figures(threshold, prompts) for prompts in draws] for run in runs]
    for row, y in enumerate(("log_bad", "cvar")):
        for column, x in enumerate(("reward", "kl")):
            panel, named = panels[row][column], set()
            for run, found in zip(runs, figures):
                value, low, high = bounds([one[y] for one in found])
                label = None if run.method in named else run.method
                named.add(run.method)
                shape = {"marker": "D", "markersize": 4, "linewidth": 0.8} if run.method in others else {"marker": "o"}
                panel.errorbar(found[0][x], value, [[max(0, value - low)], [max(0, high - value)]], capsize=2,
                               color=colours[run.method], linestyle="none", label=label, **shape)  # fmt: skip
            for method, seed in sorted({(run.method, run.seed) for run in runs if run.method in METHODS}):
                of_line = ((method, seed), (BEFORE, 1) if others else ())
                line = [f[0] for run, f in zip(runs, figures) if (run.method, run.seed) in of_line]
                points = sorted((point[x], point[y]) for point in line)
                panel.plot(*zip(*points), color=colours[method], linewidth=1, alpha=0.6)
            panel.set_xlabel(names[x])
            panel.set_ylabel(names[y])
            panel.grid(True, color="#dddddd", linewidth=0.6)
    if others:
        figure.legend(*panels[0][0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    else:
        panels[0][0].legend(frameon=False, fontsize=8)
    output = folder / "real_frontier.png"
    figure.savefig(output, dpi=120)
    print(output)
