"""What overoptimisation.py shows: a table in Markdown and a figure, of the rows that its jobs told.

Scores are gains over the policy before RL, in deviations of the judge's scores of held-out pairs; ± is half of the 95 %
interval of the score itself for new prompts, which is wider than that of the gain as a rule.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LABELS = {"pairs": "proxy from human pairs", "gold": "proxy from pairs that gold put in order"}
MOST_TEXTS = 4
COLOURS = ("#d1495b", "#e0912f", "#3a7d44", "#1b6ca8")


def table(rows: list[dict]) -> str:
    return "\n\n".join(part for part in (_judges(rows), _best(rows), _runs(rows), _said(rows)) if part)


def _judges(rows: list[dict]) -> str:
    lines = [
        f"| {row['job']} | {row['steps']} | {row['eval_accuracy']:.1%} |" for row in rows if "eval_accuracy" in row
    ]
    agreed = [
        f"\nScores of one prompt's answers by gold and by the {LABELS[row['job'].removeprefix('best-')]} correlate by "
        f"{row['agreement']:.2f} ({row['prompts']} prompts, {row['answers']} answers each)."
        for row in rows
        if "agreement" in row
    ]
    return (
        "\n".join(["| judge | steps | right about held-out pairs |", "|---|---|---|", *lines, *agreed]) if lines else ""
    )


def _best(rows: list[dict]) -> str:
    lines = ["| proxy | n | KL | gain, proxy | gain, gold |", "|---|---|---|---|---|"]
    for job in dict.fromkeys(row["job"] for row in rows if "n" in row):
        for row, proxy, gold in _best_points(rows, job):
            label = job.removeprefix("best-")
            margins = [(row[name][2] - row[name][1]) / 2 for name in ("proxy", "gold")]
            gains = [f"{gain:+.2f} ± {margin:.2f}" for gain, margin in zip((proxy, gold), margins)]
            lines.append(f"| {label} | {row['n']} | {row['kl_answer']:.2f} | {' | '.join(gains)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _runs(rows: list[dict]) -> str:
    """Of each run a few places that nothing was chosen by. Where gold is highest would be no such place: of several
    noisy figures the highest is too high, and what comes after it seems to fall."""
    lines = ["| proxy | KL weight | seed | iteration | KL of an answer | gain, proxy | gain, gold | tokens | "
             "entropy of a token |"]  # fmt: skip
    lines.append("|" + "---|" * 9)
    for job in dict.fromkeys(row["job"] for row in rows if row["job"].startswith("ppo-")):
        label, weight, seed = job.removeprefix("ppo-").rsplit("-", 2)
        points = list(curve(rows, job))
        if not points:
            continue
        for point in (points[round(part * (len(points) - 1))] for part in (0.25, 0.5, 0.75, 1)):
            gains = [f"{point[name]:+.2f}{_margin(point, name)}" for name in ("proxy", "gold")]
            figures = f"{point['kl']:.1f} | {' | '.join(gains)} | {point['length']:.0f} | {point['entropy']:.3f}"
            lines.append(f"| {label} | {weight} | {seed} | {point['step']} | {figures} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _said(rows: list[dict]) -> str:
    """What each run answered when it was looked at last, texts that are alike once."""
    lines = []
    for job in dict.fromkeys(row["job"] for row in rows if "said" in row):
        last = [row for row in rows if row["job"] == job and "said" in row][-1]
        counts = Counter(answer["response"] for answer in last["said"])
        lines.append(
            f"{job}, iteration {last['step']}: {len(counts)} different texts of {counts.total()} to held-out prompts"
        )
        most = counts.most_common(MOST_TEXTS)
        lines += [f"- {count} x {json.dumps(text, ensure_ascii=False)}" for text, count in most]
    return "\n".join(lines)


def _margin(point: dict, name: str) -> str:
    return f" ± {point[name + '_margin']:.2f}" if name + "_margin" in point else ""


def curve(rows: list[dict], job: str) -> Iterator[dict]:
    """Gains on held-out prompts, where they were looked at; KL and entropy are of the iteration's own answers."""
    start = None
    kl, length, entropy = 0.0, 0.0, float("nan")
    for row in rows:
        if row["job"] != job or "step" not in row:
            continue
        kl, length = row.get("kl_answer", kl), row.get("length", length)
        entropy = row.get("sampled_entropy", entropy)
        if "eval_gold" in row and "eval_proxy" in row:
            start = start or row
            gains = {name: row[f"eval_{name}"] - start[f"eval_{name}"] for name in ("proxy", "gold")}
            margins = {
                f"{name}_margin": (row[f"eval_{name}_high"] - row[f"eval_{name}_low"]) / 2
                for name in ("proxy", "gold")
                if f"eval_{name}_high" in row
            }
            yield {"step": row["step"], "kl": kl, "length": length, "entropy": entropy, **gains, **margins}


def _best_points(rows: list[dict], job: str) -> Iterator[tuple[dict, float, float]]:
    mine = [row for row in rows if row["job"] == job and "n" in row]
    one = next(row for row in mine if row["n"] == 1)
    return ((row, row["proxy"][0] - one["proxy"][0], row["gold"][0] - one["gold"][0]) for row in mine)


def draw(rows: list[dict], path: Path) -> None:
    """For each kind of proxy: what proxy (dashed) and gold (solid) say, over the root of the KL; below it how open the
    policy's answers still are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    jobs = list(dict.fromkeys(row["job"] for row in rows if row["job"].startswith(("ppo-", "best-"))))
    if not jobs:
        raise SystemExit("nothing to draw: no PPO and no best of n in the results yet")
    labels = [label for label in LABELS if any(job.split("-")[1] == label for job in jobs)]
    size, heights = (6.5 * len(labels), 5.6), {"height_ratios": (3, 1)}
    figure, axes = pyplot.subplots(2, len(labels), figsize=size, squeeze=False, sharex="col", gridspec_kw=heights)
    for axis, below, label in zip(*axes, labels):
        weights = sorted({float(job.split("-", 2)[2].rsplit("-", 1)[0]) for job in jobs if f"ppo-{label}-" in job})
        for job in (job for job in jobs if job.startswith(f"ppo-{label}-")):
            weight, seed = job.removeprefix(f"ppo-{label}-").rsplit("-", 1)
            colour = COLOURS[weights.index(float(weight)) % len(COLOURS)]
            points = list(curve(rows, job))
            distances = [max(0.0, point["kl"]) ** 0.5 for point in points]
            for name, style in (("gold", "-"), ("proxy", "--")):
                told = f"PPO, KL weight {weight}" if name == "gold" and seed == "1" else None
                axis.plot(distances, [point[name] for point in points], style, color=colour, label=told, linewidth=1.2)
            below.plot(distances, [point["entropy"] for point in points], color=colour, linewidth=1.2)
        if f"best-{label}" in jobs:
            points = list(_best_points(rows, f"best-{label}"))
            distances = [row["kl_answer"] ** 0.5 for row, *_ in points]
            axis.plot(distances, [gold for *_, gold in points], "k.-", label="best of n")
            axis.plot(distances, [proxy for _, proxy, _ in points], "k.--")
        axis.set_title(LABELS[label], fontsize=10)
        axis.set_ylabel("gain: gold (solid), proxy (dashed)")
        below.set_xlabel("root of the KL of an answer (nats)")
        below.set_ylabel("entropy of a token")
        below.set_ylim(bottom=0)
        axis.axhline(0, color="#999999", linewidth=0.6)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
