"""One page about several runs: their curves over each other, their final figures, and the options they differ in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path, PurePath

from trimtab.errors import UserError
from trimtab.report.curves import COLOURS, Line, chart, smooth, window_of
from trimtab.report.figures import LOSS, objective_pictures, pace_pictures
from trimtab.report.findings import findings, loss_ends
from trimtab.report.numbers import duration, percent, plain, short_number
from trimtab.report.page import document, place, write_page
from trimtab.report.picture import EVALUATION, Picture
from trimtab.report.read import Run, read_run
from trimtab.report.rewards import accuracy_of
from trimtab.report.sections import MOST_SAMPLES, evaluation_only, flatten, pairs, sample_cell, sentence
from trimtab.report.settings import chosen_options, defaults_of, differing_options
from trimtab.report.subject import job_name, lead, subject

PAGE = "comparison.html"
FEW_RUNS = 4
"""Up to so many runs show their single steps behind the means."""


def write_comparison(run_folders: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page about these runs and return its path: comparison.html in the first one's folder, or `output`."""
    seen: set[Path] = set()
    for folder in run_folders:
        if Path(folder).resolve() in seen:
            raise UserError(f"{folder} is given twice; give different runs")
        seen.add(Path(folder).resolve())
    runs = [read_run(folder) for folder in run_folders]
    return write_page(render(runs), place(output, PAGE, runs[0].folder))


def render(runs: Sequence[Run]) -> str:
    labels = names_of(runs)
    sections = (_headline, _findings, _figures, _options, _curves, _samples, _common)
    body = "\n".join(section(runs, labels) for section in sections)
    return document(" and ".join(labels), body, list(runs))


def names_of(runs: Sequence[Run]) -> list[str]:
    """The shortest ends of the runs' paths that tell them apart."""
    paths = [PurePath(run.folder.resolve()).parts for run in runs]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths) and length < max(map(len, paths)):
        length += 1
    return ["/".join(path[-length:]) for path in paths]


def _headline(runs: Sequence[Run], labels: Sequence[str]) -> str:
    jobs = list(dict.fromkeys(job_name(run) for run in runs))
    entries = "".join(
        f"<li>{_swatch(index)}<b>{escape(label)}</b> <span>{escape(subject(run))} · {escape(lead(run))}</span></li>"
        for index, (run, label) in enumerate(zip(runs, labels))
    )
    return (
        f"<header><p class=eyebrow>{escape(', '.join(jobs))}</p><h1>{len(runs)} runs side by side</h1></header>"
        f"<ul class=runs>{entries}</ul>"
    )


def _swatch(index: int) -> str:
    return f'<i class="swatch c{index % COLOURS}{" dashed" if index >= COLOURS else ""}"></i>'


def _findings(runs: Sequence[Run], labels: Sequence[str]) -> str:
    entries = [f"<li>{sentence(told)}</li>" for told in comparability(runs)]
    who: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        for told in findings(run):
            who.setdefault(told, []).append(index)
    for told, members in who.items():
        names = ", ".join(f"{_swatch(index)}<b>{escape(labels[index])}</b>" for index in members)
        entries.append(f"<li>{names if len(members) < len(runs) else '<b>All runs</b>'}: {sentence(told)}</li>")
    if not entries:
        return "<ul class='findings calm'><li>Nothing unusual was found in these runs.</li></ul>"
    return f"<ul class=findings>{''.join(entries)}</ul>"


def comparability(runs: Sequence[Run]) -> Iterator[str]:
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


def _known(run: Run, name: str) -> bool:
    return isinstance(run.manifest.get(name), str)


Value = tuple[float | None, str]


def _figures(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Final figures, one row a figure, the best of a row marked."""
    rows = ""
    for name, better, figure in _rows_of(runs):
        values = [figure(run) for run in runs]
        if all(value is None for value, _ in values):
            continue
        known = [value for value, _ in values if value is not None]
        best = _best(known, better)
        cells = "".join(
            f"<td{' class=best' if best is not None and value == best else ''}>{escape(text)}</td>"
            for value, text in values
        )
        rows += f"<tr><td>{escape(name)}</td>{cells}</tr>"
    return f"<h2>Final figures</h2>{_table(labels, rows)}"


def _best(values: Sequence[float], better: int) -> float | None:
    """The best value, if the differences are worth a mark."""
    low, high = min(values), max(values)
    if not better or high - low <= 0.01 * max(abs(low), abs(high)):
        return None
    return high if better > 0 else low


def _rows_of(runs: Sequence[Run]) -> Iterator[tuple[str, int, Callable[[Run], Value]]]:
    comparable = len({run.job for run in runs}) == 1

    def number(value: float | None, form: Callable[[float], str] = short_number) -> Value:
        return value, "–" if value is None else form(value)

    def final(metric: str, form: Callable[[float], str]) -> Callable[[Run], Value]:
        return lambda run: number((run.ends(metric) or (None, None))[1], form)

    def evaluated(metric: str, form: Callable[[float], str]) -> Callable[[Run], Value]:
        return lambda run: number(run.last(f"{EVALUATION}{metric}"), form)

    pictures = objective_pictures(runs)
    yield ("iterations" if all(run.is_rl for run in runs) else "steps"), 0, lambda run: number(float(run.steps))
    if LOSS in pictures:
        yield "loss", -1 if comparable else 0, lambda run: number((loss_ends(run) or (None, None))[1])
        yield "evaluation loss", -1 if comparable else 0, lambda run: number(run.last("eval_loss"))
    for picture in pictures:
        if picture is LOSS:
            continue
        form = percent if picture.share else short_number
        for metric in picture.metrics:
            name = picture.name_of(metric)
            name = name if name[:2].isupper() else name[0].lower() + name[1:]
            trained = any(run.series(metric) for run in runs)
            yield name, picture.better, final(metric, form)
            yield f"{name}, evaluation" if trained else name, picture.better, evaluated(metric, form)
    yield "accuracy on stored pairs", 1, _stored_accuracy
    yield "training time", -1, lambda run: number(run.total("seconds") or None, duration)
    yield "tokens", 0, lambda run: number(run.total("tokens") or None)
    yield "tokens a second", 1, lambda run: number(_rate(run))
    yield "peak memory, GiB", -1, lambda run: number(max((v for _, v in run.series("memory_gib")), default=None))


def _rate(run: Run) -> float | None:
    seconds = run.total("seconds")
    return run.total("tokens") / seconds if seconds else None


def _stored_accuracy(run: Run) -> Value:
    accuracy = accuracy_of(run.pairs)
    if accuracy is None:
        return None, "–"
    low, high = accuracy.interval
    return accuracy.share, f"{percent(accuracy.share)} ({percent(low)} to {percent(high)})"


def _options(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Options that differ; a value somebody chose stands out from a default."""
    rows = ""
    for name in differing_options(runs):
        cells = ""
        for run in runs:
            known = name in run.options
            chosen = known and name in chosen_options(run)
            text = plain(run.options[name]) if known else "not an option"
            cells += f"<td class={'chosen' if chosen else 'default'}>{escape(text)}</td>"
        rows += f"<tr><td>{escape(str(name))}</td>{cells}</tr>"
    if not rows:
        return "<h2>Options</h2><p class=words>These runs have the same options.</p>"
    note = "Bold: not at the job's default." if any(defaults_of(run.job) for run in runs) else ""
    return f"<h2>Options that differ</h2><p class=words>{note}</p>{_table(labels, rows)}"


def _table(labels: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{_swatch(index)}{escape(label)}</th>" for index, label in enumerate(labels))
    return f'<div class="card scroll"><table class="data sides"><tr><th></th>{head}</tr>{rows}</table></div>'


def _curves(runs: Sequence[Run], labels: Sequence[str]) -> str:
    if not any(run.rows for run in runs):
        return ""
    drawn = "".join(
        _chart(runs, labels, picture, metric) for picture in objective_pictures(runs) for metric in picture.metrics
    )
    pace = "".join(
        _chart(runs, labels, picture, metric) for picture in pace_pictures(runs) for metric in picture.metrics
    )
    return (
        f"<h2>Curves</h2><div class=charts>{drawn}</div>"
        f"<h2>Speed, memory and the optimiser</h2><div class=charts>{pace}</div>"
    )


def _chart(runs: Sequence[Run], labels: Sequence[str], picture: Picture, metric: str) -> str:
    lines: list[Line] = []
    notes = []
    for index, (run, label) in enumerate(zip(runs, labels)):
        points, evaluation = run.series(metric), run.series(f"{EVALUATION}{metric}")
        if not points:
            lines += evaluation_only(label, evaluation, index)
            continue
        window = 1 if metric in ("learning_rate", "memory_gib") else window_of(points)
        if window > 1 and len(runs) <= FEW_RUNS:
            lines.append(Line(f"{label}, step", points, "raw", index, in_legend=False))
        lines.append(Line(label, smooth(points, window), "smooth", index))
        lines.append(Line(f"{label}, evaluation", evaluation, "dots", index, in_legend=False))
        if window > 1:
            notes.append("means of a few steps")
        if evaluation:
            notes.append("dots: evaluation")
    tall = picture.tall and len(picture.metrics) == 1
    note = "; ".join(dict.fromkeys(notes))
    return chart(picture.name_of(metric), lines, note, tall=tall, share=picture.share, level=picture.level)


def _samples(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Answers to the prompts that several of the runs were asked."""
    answers: dict[str, dict[int, dict]] = {}
    for index, run in enumerate(runs):
        for sample in run.samples:
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
        "<h2>Answers after training</h2><div class=card><table class=samples>"
        f"<thead><tr>{head}<th>Reference</th></tr></thead><tbody>{body}</tbody></table></div>"
    )


def _common(runs: Sequence[Run], labels: Sequence[str]) -> str:
    differing = set(differing_options(runs))
    shared = {name: value for name, value in chosen_options(runs[0]).items() if name not in differing}
    if not shared:
        return ""
    return f"<h2>Options in common</h2><div class=card>{pairs(flatten(shared))}</div>"
