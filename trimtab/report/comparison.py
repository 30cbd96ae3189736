"""The page about several runs: curves over each other, final figures, options that differ.

Runs that differ only in their seed are one column and one curve: the mean, and its 95 % interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from trimtab.errors import UserError
from trimtab.evaluate.tail_risk import t_intervals
from trimtab.report.charts import (
    COLOURS,
    EVALUATION,
    LOSS,
    Line,
    Panel,
    chart,
    objective_panels,
    pace_panels,
    smooth,
    window_of,
)
from trimtab.report.distributions import accuracy_of
from trimtab.report.findings import findings
from trimtab.report.formatting import duration, percent, plain, short_number
from trimtab.report.page import MOST_SAMPLES, flatten, pairs, place, sample_cell, sentence, static_page, write_page
from trimtab.report.run_data import Point, RunData, finite, read_run
from trimtab.report.summary import PLACES, chosen_options, defaults_of, differing_options, job_name, lead, subject

WITHOUT_MEANING = PLACES | {"seed", "use_tensorboard", "use_visualdl", "record", "wandb_group"}
"""Options in which runs of one experiment may differ."""

COUNTER = re.compile(r"([-_./ ]?seed|(^|[-_./ ])s)?[-_./ ]?[0-9]*$")
"""What stands before the digits in which the names of seeds differ, with digits that they share: -1, _s1, -seed1."""


@dataclass(frozen=True)
class Column:
    label: str
    runs: tuple[RunData, ...]

    @property
    def first(self) -> RunData:
        return self.runs[0]

    @property
    def several(self) -> bool:
        return len(self.runs) > 1

    @property
    def seeds(self) -> str:
        return ", ".join(plain(run.options.get("seed", "–")) for run in self.runs)

    def mean(self, figure: Callable[[RunData], float | None]) -> tuple[float, float] | None:
        """Over the runs that have the figure, and the half-width of its interval."""
        known = [value for run in self.runs if (value := figure(run)) is not None]
        if not known:
            return None
        centre, width = t_intervals(np.array(known)[:, None])
        return float(centre[0]), float(width[0])

    def curve(self, points: Callable[[RunData], Sequence[Point]], kind: str, series: int, **more: Any) -> Line:
        """Of one run its points; of several their mean at the steps that all of them have, and its interval."""
        if not self.several:
            return Line(self.label, points(self.first), kind, series, **more)
        curves = [dict(points(run)) for run in self.runs]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not steps:
            return Line(self.label, [], kind, series, **more)
        centre, width = t_intervals(np.array([[curve[step] for step in steps] for curve in curves]))
        mean, low, high = (list(zip(steps, edge.tolist())) for edge in (centre, centre - width, centre + width))
        return Line(self.label, mean, kind, series, low=low, high=high, **more)


def columns_of(runs: Sequence[RunData]) -> list[Column]:
    """The runs in their order; one that differs from an earlier one only in its seed joins it."""
    groups: list[list[tuple[str, RunData]]] = []
    for label, run in zip(names_of(runs), runs):
        group = next((known for known in groups if _joins(run, [other for _, other in known])), None)
        if group is None:
            groups.append([(label, run)])
        else:
            group.append((label, run))
    labels = _labels([[name for name, _ in group] for group in groups])
    return [Column(label, tuple(run for _, run in group)) for label, group in zip(labels, groups)]


def names_of(runs: Sequence[RunData]) -> list[str]:
    """The shortest ends of the runs' paths that tell them apart."""
    paths = [PurePath(run.folder.resolve()).parts for run in runs]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths) and length < max(map(len, paths)):
        length += 1
    return ["/".join(path[-length:]) for path in paths]


def _joins(run: RunData, group: Sequence[RunData]) -> bool:
    seeds = [finite(member.options.get("seed")) for member in (run, *group)]
    if None in seeds or seeds[0] in seeds[1:]:
        return False
    return run.job == group[0].job and _meaning(run) == _meaning(group[0])


def _meaning(run: RunData) -> dict:
    return {name: value for name, value in run.options.items() if name not in WITHOUT_MEANING}


def _labels(groups: Sequence[Sequence[str]]) -> list[str]:
    """A label for each group of names, different from all others."""
    short = [_label(names) for names in groups]
    return [
        label if short.count(label) == 1 else f"{names[0]} to {names[-1]}, {len(names)} seeds"
        for label, names in zip(short, groups)
    ]


def _label(names: Sequence[str]) -> str:
    """What the names of a group begin with, without the word that counts them."""
    if len(names) == 1:
        return names[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names))
    shared = "".join(letters[0] for letters in alike)
    counted = any(name[len(shared) :][:1].isdigit() for name in names)
    shared = COUNTER.sub("", shared) if counted else shared.rstrip("-_./ ")
    return f"{shared or names[0]}, {len(names)} seeds"


# ---- The page about several runs.


PAGE = "comparison.html"
FEW_COLUMNS = 4
"""Up to this many columns show their single steps behind the means."""


def write_comparison(run_folders: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page about these runs and return its path: comparison.html in the first one's folder, or `output`."""
    seen: set[Path] = set()
    for folder in run_folders:
        if Path(folder).resolve() in seen:
            raise UserError(f"{folder} is given twice; give different runs")
        seen.add(Path(folder).resolve())
    runs = [read_run(folder) for folder in run_folders]
    return write_page(render(runs), place(output, PAGE, runs[0].folder))


def render(runs: Sequence[RunData]) -> str:
    columns = columns_of(runs)
    sections = (_headline, _findings, _figures, _options, _curves, _samples, _common)
    title = " and ".join(column.label for column in columns)
    return static_page(title, [section(columns) for section in sections], [run.folder for run in runs])


def _all(columns: Sequence[Column]) -> list[RunData]:
    return [run for column in columns for run in column.runs]


def _headline(columns: Sequence[Column]) -> str:
    runs = _all(columns)
    jobs = list(dict.fromkeys(job_name(run) for run in runs))
    entries = "".join(
        f"<li>{_swatch(index)}<b>{escape(column.label)}</b> <span>{escape(_told(column))}</span></li>"
        for index, column in enumerate(columns)
    )
    return (
        f"<header><p class=eyebrow>{escape(', '.join(jobs))}</p><h1>{len(runs)} runs side by side</h1></header>"
        f"<ul class=runs>{entries}</ul>"
    )


def _told(column: Column) -> str:
    return f"{subject(column.first)} · " + (f"seeds {column.seeds}" if column.several else lead(column.first))


def _swatch(index: int) -> str:
    return f'<i class="swatch c{index % COLOURS}{" dashed" if index >= COLOURS else ""}"></i>'


def _findings(columns: Sequence[Column]) -> str:
    runs = _all(columns)
    entries = [f"<li>{sentence(told)}</li>" for told in comparability(runs)]
    who: dict[str, list[str]] = {}
    for index, column in enumerate(columns):
        for run in column.runs:
            seed = f", seed {plain(run.options['seed'])}" if column.several else ""
            for told in findings(run):
                who.setdefault(told, []).append(f"{_swatch(index)}<b>{escape(column.label + seed)}</b>")
    for told, names in who.items():
        named = ", ".join(names) if len(names) < len(runs) else "<b>All runs</b>"
        entries.append(f"<li>{named}: {sentence(told)}</li>")
    if not entries:
        return "<ul class='findings calm'><li>Nothing unusual was found in these runs.</li></ul>"
    return f"<ul class=findings>{''.join(entries)}</ul>"


def comparability(runs: Sequence[RunData]) -> Iterator[str]:
    """Why figures may not say which run is better."""
    if all(run.is_rl for run in runs):
        if len({plain(reward) for run in runs if (reward := run.manifest.get("reward")) is not None}) > 1:
            yield "These runs have different rewards: their rewards and successes are not on one scale."
    elif len({run.job for run in runs}) > 1:
        yield "These runs are different jobs: their losses are not on one scale."
    elif len({plain(run.options.get("preference_loss")) for run in runs if run.options}) > 1:
        yield "These runs minimise different losses: compare accuracy and samples, not the losses themselves."
    if len({run.manifest["initial_weights"] for run in runs if _known(run, "initial_weights")}) > 1:
        yield "These runs started from different weights."
    described = [run.data.get("evaluation") for run in runs]
    evaluations = [evaluation for evaluation in described if isinstance(evaluation, dict)]
    counts = {(plain(e.get("rows_kept")), plain(e.get("tokens"))) for e in evaluations}
    if len(counts) > 1:
        yield "These runs were evaluated on different data."
    if len({int(run.last("step") or 0) for run in runs}) > 1:
        yield "These runs have different numbers of steps; final figures are those at each one's own end."


def _known(run: RunData, name: str) -> bool:
    return isinstance(run.manifest.get(name), str)


@dataclass(frozen=True)
class Row:
    """A final figure: `better` is 1 or -1 where more or less of it is better."""

    name: str
    better: int
    figure: Callable[[RunData], float | None]
    form: Callable[[float], str] = short_number
    note: Callable[[RunData], str] = lambda run: ""
    """What follows the figure of a single run."""


def _figures(columns: Sequence[Column]) -> str:
    """Final figures, one row a figure, the best of a row marked."""
    rows = ""
    for row in _rows_of(_all(columns)):
        means = [column.mean(row.figure) for column in columns]
        if all(mean is None for mean in means):
            continue
        best = _best([mean for mean in means if mean is not None], row.better)
        cells = "".join(
            f"<td{' class=best' if best is not None and mean == best else ''}>{escape(_cell(column, row, mean))}</td>"
            for column, mean in zip(columns, means)
        )
        rows += f"<tr><td>{escape(row.name)}</td>{cells}</tr>"
    seeds = "<p class=words>± is the half-width of the 95 % t-interval of the mean over seeds.</p>"
    note = seeds if any(column.several for column in columns) else ""
    return f"<h2>Final figures</h2>{note}{_table(columns, rows)}"


def _cell(column: Column, row: Row, mean: tuple[float, float] | None) -> str:
    if mean is None:
        return "–"
    centre, width = mean
    if column.several:
        return f"{row.form(centre)} ± {row.form(width)}"
    return row.form(centre) + row.note(column.first)


def _best(means: Sequence[tuple[float, float]], better: int) -> tuple[float, float] | None:
    """The best mean, if the differences are worth a mark and no other's interval reaches it."""
    low, high = min(centre for centre, _ in means), max(centre for centre, _ in means)
    if not better or high - low <= 0.01 * max(abs(low), abs(high)):
        return None
    best = max(means, key=lambda mean: better * mean[0])
    others = [mean for mean in means if mean[0] != best[0]]
    apart = all(abs(best[0] - centre) > best[1] + width for centre, width in others)
    return best if apart else None


def _rows_of(runs: Sequence[RunData]) -> Iterator[Row]:
    less_is_better = -1 if len({run.job for run in runs}) == 1 else 0

    def final(metric: str) -> Callable[[RunData], float | None]:
        return lambda run: (run.ends(metric) or (None, None))[1]

    def evaluated(metric: str) -> Callable[[RunData], float | None]:
        return lambda run: run.last(f"{EVALUATION}{metric}")

    pictures = objective_panels(runs)
    yield Row("iterations" if all(run.is_rl for run in runs) else "steps", 0, lambda run: float(run.steps))
    if LOSS in pictures:
        yield Row("loss", less_is_better, final("loss"))
        yield Row("evaluation loss", less_is_better, lambda run: run.last("eval_loss"))
    for picture in pictures:
        if picture is LOSS:
            continue
        form = percent if picture.share else short_number
        for metric in picture.metrics:
            name = picture.name_of(metric)
            name = name if name[:2].isupper() else name[0].lower() + name[1:]
            trained = any(run.series(metric) for run in runs)
            yield Row(name, picture.better, final(metric), form)
            yield Row(f"{name}, evaluation" if trained else name, picture.better, evaluated(metric), form)
    yield Row("accuracy on stored pairs", 1, _stored_accuracy, percent, _stored_interval)
    yield Row("training time", -1, lambda run: run.total("seconds") or None, duration)
    yield Row("tokens", 0, lambda run: run.total("tokens") or None)
    yield Row("tokens a second", 1, _rate)
    yield Row("peak memory, GiB", -1, lambda run: max((v for _, v in run.series("memory_gib")), default=None))


def _rate(run: RunData) -> float | None:
    seconds = run.total("seconds")
    return run.total("tokens") / seconds if seconds else None


def _stored_accuracy(run: RunData) -> float | None:
    accuracy = accuracy_of(run.pairs)
    return None if accuracy is None else accuracy.share


def _stored_interval(run: RunData) -> str:
    accuracy = accuracy_of(run.pairs)
    assert accuracy is not None
    low, high = accuracy.interval
    return f" ({percent(low)} to {percent(high)})"


def _options(columns: Sequence[Column]) -> str:
    """Options that differ; a value somebody chose stands out from a default."""
    firsts = [column.first for column in columns]
    rows = ""
    for name in differing_options(_all(columns)):
        cells = ""
        for column, run in zip(columns, firsts):
            known = name in run.options
            chosen = known and name in chosen_options(run)
            text = plain(run.options[name]) if known else "not an option"
            text = column.seeds if name == "seed" and column.several else text
            cells += f"<td class={'chosen' if chosen else 'default'}>{escape(text)}</td>"
        rows += f"<tr><td>{escape(str(name))}</td>{cells}</tr>"
    if not rows:
        return "<h2>Options</h2><p class=words>These runs have the same options.</p>"
    note = "Bold: not at the job's default." if any(defaults_of(run.job) for run in firsts) else ""
    return f"<h2>Options that differ</h2><p class=words>{note}</p>{_table(columns, rows)}"


def _table(columns: Sequence[Column], rows: str) -> str:
    head = "".join(f"<th>{_swatch(index)}{escape(column.label)}</th>" for index, column in enumerate(columns))
    return f'<div class="card scroll"><table class="data sides"><tr><th></th>{head}</tr>{rows}</table></div>'


def _curves(columns: Sequence[Column]) -> str:
    runs = _all(columns)
    if not any(run.rows for run in runs):
        return ""
    drawn, pace = (
        "".join(_chart(columns, picture, metric) for picture in pictures for metric in picture.metrics)
        for pictures in (objective_panels(runs), pace_panels(runs))
    )
    return (
        f"<h2>Curves</h2><div class=charts>{drawn}</div>"
        f"<h2>Speed, memory and the optimiser</h2><div class=charts>{pace}</div>"
    )


def _chart(columns: Sequence[Column], picture: Panel, metric: str) -> str:
    lines: list[Line] = []
    notes = []

    def means(run: RunData) -> list[Point]:
        return smooth(run.series(metric), _window(run, metric))

    def evaluations(run: RunData) -> list[Point]:
        return run.series(f"{EVALUATION}{metric}")

    for index, column in enumerate(columns):
        evaluation = column.curve(evaluations, "dots", index, in_legend=False)
        curve = column.curve(means, "smooth", index)
        if column.several:
            notes.append("shaded: 95 % interval of the mean over seeds")
        if not curve.points:
            lines += [column.curve(evaluations, "only", index), replace(evaluation, low=(), high=())]
            continue
        if _window(column.first, metric) > 1:
            notes.append("means of a few steps")
            if not column.several and len(columns) <= FEW_COLUMNS:
                raw = column.first.series(metric)
                lines.append(Line(f"{column.label}, step", raw, "raw", index, in_legend=False))
        lines += [curve, replace(evaluation, name=f"{column.label}, evaluation", low=(), high=())]
        if evaluation.points:
            notes.append("dots: evaluation")
    tall = picture.tall and len(picture.metrics) == 1
    note = "; ".join(dict.fromkeys(notes))
    return chart(picture.name_of(metric), lines, note, tall=tall, share=picture.share, level=picture.level)


def _window(run: RunData, metric: str) -> int:
    return 1 if metric in ("learning_rate", "memory_gib") else window_of(run.series(metric))


def _samples(columns: Sequence[Column]) -> str:
    """Answers to the prompts that several of the columns were asked; of seeds the first one's."""
    labels = [column.label for column in columns]
    answers: dict[str, dict[int, dict]] = {}
    for index, column in enumerate(columns):
        for sample in column.first.samples:
            answers.setdefault(plain(sample.get("prompt", "")), {})[index] = sample
    shared = {prompt: found for prompt, found in answers.items() if len(found) > 1}
    if not shared:
        return ""
    head = "<th>Prompt</th>" + "".join(f"<th>{_swatch(i)}{escape(label)}</th>" for i, label in enumerate(labels))
    body = ""
    for prompt, found in list(shared.items())[:MOST_SAMPLES]:
        cells = sample_cell({"prompt": prompt}, "prompt", "Prompt")
        cells += "".join(sample_cell(found.get(i, {}), "after", label) for i, label in enumerate(labels))
        reference = next((sample["reference"] for sample in found.values() if "reference" in sample), "")
        body += f"<tr>{cells}{sample_cell({'reference': reference}, 'reference', 'Reference')}</tr>"
    return (
        "<h2>Answers after training</h2><div class='card scroll padded'><table class=samples>"
        f"<thead><tr>{head}<th>Reference</th></tr></thead><tbody>{body}</tbody></table></div>"
    )


def _common(columns: Sequence[Column]) -> str:
    differing = set(differing_options(_all(columns)))
    shared = {name: value for name, value in chosen_options(columns[0].first).items() if name not in differing}
    if not shared:
        return ""
    return f"<h2>Options in common</h2><div class=card>{pairs(flatten(shared))}</div>"
