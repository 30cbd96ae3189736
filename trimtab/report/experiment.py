"""One HTML page about an experiment of several methods and seeds: a table of what came out, and its figures."""

from html import escape
from pathlib import Path

from trimtab.errors import UserError
from trimtab.evaluate.tail_risk import Estimate
from trimtab.report.manifest import Manifest
from trimtab.report.numbers import short_number
from trimtab.report.outcomes import measured, point_of, was_attacked
from trimtab.report.page import document, write_page
from trimtab.report.plots import curves_figure, frontier_figure, inline, name_of

COLUMNS = ("reward", "return", "bad", "cvar", "gcg")


def write_experiment(manifest: Manifest, output: Path) -> Path:
    """What cannot be shown, because its files or its threshold are not there, is said instead."""
    columns: dict[str, list[Estimate]] = {}
    absent: list[str] = []
    for what in COLUMNS:
        if what == "gcg" and not was_attacked(manifest):
            continue
        try:
            columns[what] = [point_of(manifest, method, what) for method in manifest.methods]
        except UserError as error:
            absent.append(str(error))
    pictures = []
    for draw in (
        *(lambda kind=kind: curves_figure(manifest, [kind]) for kind in _kinds(manifest, absent)),
        *(lambda y=y: frontier_figure(manifest, "return", y) for y in ("bad", "cvar", "gcg") if y in columns),
    ):
        try:
            pictures.append(f"<figure class=chart>{inline(draw())}</figure>")
        except UserError as error:
            absent.append(str(error))
    if not columns and not pictures:
        raise UserError(absent[0])
    title = manifest.path.stem
    notes = "".join(f"<li>Not shown: {escape(told)}</li>" for told in dict.fromkeys(absent))
    body = [
        f"<header><p class=eyebrow>experiment</p><h1>{escape(title)}</h1></header>",
        f"<ul class=findings>{notes}</ul>" if notes else "",
        _table(manifest, columns) if columns else "",
        f"<h2>Figures</h2><div class=charts>{''.join(pictures)}</div>" if pictures else "",
    ]
    return write_page(document(title, "\n".join(body), [manifest]), output)


def _kinds(manifest: Manifest, absent: list[str]) -> list[str]:
    try:
        return measured(manifest)
    except UserError as error:
        absent.append(str(error))
        return []


def _table(manifest: Manifest, columns: dict[str, list[Estimate]]) -> str:
    heads = "".join(f"<th>{escape(name_of(what, manifest))}</th>" for what in columns)
    rows = ""
    for number, method in enumerate(manifest.methods):
        cells = "".join(f"<td>{_cell(values[number])}</td>" for values in columns.values())
        rows += f"<tr><td>{escape(method.label)}</td><td>{len(method.seeds)}</td>{cells}</tr>"
    head = f"<tr><th>method</th><th>seeds</th>{heads}</tr>"
    told = "Means over seeds; in brackets 95 % of the means of resampled seeds, which is too narrow for two or three. "
    told += "Where nothing was counted, or everything, the interval is Wilson's over the samples of all seeds."
    table = f"<table class='data sides'>{head}{rows}</table>"
    return f"<h2>Outcomes</h2><p class=words>{told}</p><div class='card scroll'>{table}</div>"


def _cell(found: Estimate) -> str:
    if found.low == found.high:
        return short_number(found.value)
    return f"{short_number(found.value)} ({short_number(found.low)} to {short_number(found.high)})"
