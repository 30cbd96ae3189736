"""What skill.py shows: tables in Markdown and a figure, of the rows that its jobs told."""

from collections.abc import Iterator
from pathlib import Path

COLUMNS = "pass@1 | pass@8 | have the form | right of those | right at the end, any form | tokens | KL | entropy"
METHODS = {"grpo": "GRPO", "dapo": "DAPO", "rloo": "RLOO", "reinforce++": "REINFORCE++", "ppo": "PPO"}
COLOURS = dict(zip(METHODS, ("#1b6ca8", "#d1495b", "#3a7d44", "#8f6bb3", "#e0912f")))


def trials(rows: list[dict]) -> str:
    """What was tried, on the validation prompts."""
    lines = [f"| task | model | {COLUMNS} |", "|" + "---|" * 10]
    for job, row in _finals(rows):
        if job.startswith("try-"):
            _, task, _, *rate = job.split("-", 3)
            called = f"SFT, learning rate {rate[0]}" if rate else "as it came"
            lines.append(f"| {task} | {called} | {_cells(row)} |")
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """What is shown, on the test prompts: a line for each run with its learning rate. 95 % intervals are of new
    prompts; the KL is that to the model a run began with."""
    lines = [f"| task | model | seed | {COLUMNS} | state |", "|" + "---|" * 12]
    for job, row in _shown(rows).items():
        task, kind, *seed = job.split("-")
        called = METHODS.get(kind, {"base": "as it came", "sft": "SFT"}.get(kind))
        called += f", {row['learning_rate']:g}" if row["learning_rate"] else ""
        lines.append(f"| {task} | {called} | {seed[0] if seed else ''} | {_cells(row)} | {row['state']} |")
    return "\n".join(lines)


def _finals(rows: list[dict]) -> Iterator[tuple[str, dict]]:
    return ((row["job"], row) for row in rows if row.get("final"))


def _shown(rows: list[dict]) -> dict[str, dict]:
    """By task, the model as it came and after SFT first, the seeds of a method beside each other."""
    found = {job: row for job, row in _finals(rows) if not job.startswith(("try-", "choose-"))}
    places = {kind: place for place, kind in enumerate(["base", "sft", *METHODS])}
    order = sorted(found, key=lambda job: (job.split("-")[0], places[job.split("-")[1]], job))
    return {job: found[job] for job in order}


def _cells(row: dict) -> str:
    passes = [f"{mean:.1%} ({low:.1%} to {high:.1%})" for mean, low, high in (row["pass_1"], row["pass_8"])]
    shares = [f"{row[name]:.1%}" for name in ("parsed", "right_of_parsed", "right_at_the_end")]
    return " | ".join([*passes, *shares, f"{row['length']:.1f}", f"{row['kl_answer']:.2f}", f"{row['entropy']:.3f}"])


def draw(rows: list[dict], path: Path) -> None:
    """Of each task: right answers to test prompts over the iterations, and pass@1 and pass@8 before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    finals = _shown(rows)
    if not finals:
        raise SystemExit("nothing to draw: no job of the grid has answered the test prompts yet")
    tasks = list(dict.fromkeys(job.split("-")[0] for job in finals))
    figure, axes = pyplot.subplots(len(tasks), 3, figsize=(13, 3.6 * len(tasks)), squeeze=False)
    for line, task in zip(axes, tasks):
        mine = [row for row in rows if row["job"].startswith(f"{task}-")]
        _curves(line[0], mine, "eval_pass_1", f"{task}: pass@1 on test prompts")
        _curves(line[1], mine, "sampled_entropy", f"{task}: -log p of a drawn token")
        _bars(line[2], {job: row for job, row in finals.items() if job.startswith(f"{task}-")}, f"{task}: at the end")
        line[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _curves(axis, rows: list[dict], name: str, title: str) -> None:
    """One line a run; over answers, so that methods that leave some out are compared at equal samples."""
    told: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if name in row and "drawn" in row:
            told.setdefault(row["job"], []).append((row["drawn"], row[name]))
    seen = set()
    for job, points in told.items():
        method = job.split("-")[1]
        label = METHODS[method] if method not in seen else None
        seen.add(method)
        axis.plot(*zip(*points), color=COLOURS[method], label=label, linewidth=1.2)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("answers drawn")


def _bars(axis, finals: dict[str, dict], title: str) -> None:
    for place, (job, row) in enumerate(finals.items()):
        colour = COLOURS.get(job.split("-")[1], "#777777")
        for shift, name in ((-0.18, "pass_1"), (0.18, "pass_8")):
            mean, low, high = row[name]
            axis.errorbar(
                place + shift,
                mean,
                [[mean - low], [high - mean]],
                fmt="o" if name == "pass_1" else "s",
                color=colour,
                markerfacecolor=colour if name == "pass_1" else "white",
                capsize=2,
            )
    axis.set_xticks(range(len(finals)), [job.split("-", 1)[1] for job in finals], rotation=60, fontsize=7, ha="right")
    axis.set_ylim(0, 1)
    axis.set_title(f"{title}: pass@1 (filled), pass@8", fontsize=10)
