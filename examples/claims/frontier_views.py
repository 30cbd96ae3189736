"""What frontier.py found, as a table and as a figure."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from estimates import at
from frontier import METHODS

REWARDS, KLS = (0.6, 0.7, 0.8, 0.9), (0.1, 0.3, 1.0, 3.0)
COLOURS = dict(zip(METHODS, ("#4c72b0", "#c44e52", "#dd8452", "#55a868", "#8172b3")))
BEST = "exact optimum"  # of reward less weighted KL
Row = dict


def lines(rows: Iterable[Row]) -> dict[tuple[int, str], dict[int, list[Row]]]:
    """By budget and method: the points of each seed, by falling weight of the KL."""
    found: dict[tuple[int, str], dict[int, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: -row["kl_weight"]):
        found.setdefault((row["answers"], row["method"]), {}).setdefault(row["seed"], []).append(row)
    order = list(METHODS)
    known = {method: place for place, method in enumerate(order)}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], known.get(item[0][1], len(order)), item[0][1])))


def decades(row: Row) -> float:
    """log10 P(bad)."""
    return row["log_bad"] / math.log(10)


def table(rows: list[Row], folder: Path) -> None:
    best = optimum(folder)
    for budget in sorted({row["answers"] for row in rows}):
        everything = {m: seeds for (answers, m), seeds in lines(rows).items() if answers == budget}
        of_budget = {method: seeds for method, seeds in everything.items() if method in METHODS}
        print(f"\n{budget:,} sampled answers\n")
        print("| method | KL weight | reward | KL | log10 P(bad) | CVaR, worst 1 % |\n|---|---|---|---|---|---|")
        for method, seeds in of_budget.items():
            for weight in dict.fromkeys(row["kl_weight"] for points in seeds.values() for row in points):
                found = [row for points in seeds.values() for row in points if row["kl_weight"] == weight]
                columns = [[row["reward"] for row in found], [row["kl"] for row in found], list(map(decades, found))]
                shown = [several(values) for values in [*columns, [row["cvar_1"] for row in found]]]
                print(f"| {method} | {weight:g} | {' | '.join(shown)} |")
        for what, places, name in (("reward", REWARDS, "at the same reward"), ("kl", KLS, "at the same KL")):
            print(f"\n| log10 P(bad) {name} | {' | '.join(f'{place:g}' for place in places)} |")
            print("|---" * (1 + len(places)) + "|")
            for method, seeds in {BEST: {0: best}, **of_budget}.items():
                cells = [several(matched(seeds, what, place)) for place in places]
                print(f"| {method} | {' | '.join(cells)} |")
        variants(everything)
    proposals(rows)


def variants(found: dict[str, dict[int, list[Row]]]) -> None:
    """Other settings, beside the lines of RePULSe and REINFORCE of the same seed where they have the same KL."""
    others = [
        (method, row) for method, seeds in found.items() if method not in METHODS for p in seeds.values() for row in p
    ]
    if not others:
        return
    print("\n| setting | KL weight | reward | KL | log10 P(bad) | RePULSe at this KL | REINFORCE at this KL |")
    print("|---|---|---|---|---|---|---|")
    for method, row in others:
        shown = [f"{value:.2f}" for value in (row["reward"], row["kl"], decades(row))]
        for name in ("RePULSe", "REINFORCE"):
            same_seed = {seed: points for seed, points in found.get(name, {}).items() if seed == row["seed"]}
            shown.append(several(matched(same_seed, "kl", row["kl"])))
        print(f"| {method} | {row['kl_weight']:g} | {' | '.join(shown)} |")


def several(values: list[float]) -> str:
    """The mean, and how far the seeds are apart."""
    if not values:
        return "–"
    spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2f}{spread}"


def matched(seeds: dict[int, list[Row]], what: str, place: float) -> list[float]:
    """log10 P(bad) of each seed's line at this reward or KL, where it gets there."""
    found = [at(place, [row[what] for row in points], list(map(decades, points))) for points in seeds.values()]
    return [value for value in found if value is not None]


def optimum(folder: Path) -> list[Row]:
    """The line that REINFORCE is on its way to: the best policy for every weight of the KL."""
    from toy_world import World

    world = World(folder / "task")
    return [vars(world.best(weight)) for weight in np.geomspace(3, 0.008, 120)]


def proposals(rows: list[Row]) -> None:
    """How the proposals did in the last part of their training."""
    found = [row for row in rows if "proposal_effective_samples" in row]
    if not found:
        return
    print("\n| proposal of | answers | KL weight | bad answers of its own | effective samples | half bad after |")
    print("|---|---|---|---|---|---|")
    for (answers, method), seeds in lines(found).items():
        for weight in dict.fromkeys(row["kl_weight"] for points in seeds.values() for row in points):
            cells = [row for points in seeds.values() for row in points if row["kl_weight"] == weight]
            bad = sum(row["proposal_bad_share"] for row in cells) / len(cells)
            effective = sum(row["proposal_effective_samples"] / row["group"] for row in cells) / len(cells)
            after = ", ".join(str(row["proposal_found_after"]) for row in cells)
            print(f"| {method} | {answers:,} | {weight:g} | {100 * bad:.0f} % | {100 * effective:.0f} % of a group | "
                  f"{after} updates |")  # fmt: skip


def draw(rows: list[Row], folder: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["method"] in METHODS]
    budgets = sorted({row["answers"] for row in rows})
    figure = Figure(figsize=(13, 3.9 * len(budgets)), layout="constrained")
    grid_of_panels = figure.subplots(len(budgets), 3, squeeze=False)
    best = optimum(folder)
    panels: list[tuple[str, str, Callable[[Row], float], str]] = [
        ("reward", "mean reward", decades, "log10 P(bad)"),
        ("kl", "KL of an answer, nats", decades, "log10 P(bad)"),
        ("reward", "mean reward", lambda row: row["cvar_1"], "mean reward of the worst 1 %"),
    ]
    for budget, axes in zip(budgets, grid_of_panels):
        of_budget = [row for row in rows if row["answers"] == budget]
        for panel, (x, x_name, y, y_name) in zip(axes, panels):
            panel.plot([r[x] for r in best], [y(r) for r in best], ":", color="#666666", label=BEST)
            for (_, method), seeds in lines(of_budget).items():
                for place, points in enumerate(seeds.values()):
                    panel.plot([row[x] for row in points], [y(row) for row in points], marker="o", markersize=4,
                               linewidth=1.2, color=COLOURS[method], label=method if place == 0 else None)  # fmt: skip
            heights = [y(row) for row in of_budget]
            room = 0.08 * (max(heights) - min(heights) or 1)
            panel.set_ylim(min(heights) - room, max(heights) + room)  # the best policy goes on far below
            if x == "kl":
                panel.set_xscale("log")
                panel.set_xlim(left=0.5 * min(row["kl"] for row in of_budget))
            panel.set_xlabel(x_name)
            panel.set_ylabel(y_name)
            panel.grid(True, color="#dddddd", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
        axes[0].set_title(f"{budget:,} sampled answers", fontsize=10, loc="left")
    grid_of_panels[0][0].legend(frameon=False, fontsize=8)
    output = folder / "frontier.png"
    figure.savefig(output, dpi=120)
    print(output)


if __name__ == "__main__":
    raise SystemExit("python examples/claims/frontier.py table | draw")
