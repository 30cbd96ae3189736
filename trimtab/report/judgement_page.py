"""The page of `trimtab compare`: the verdict, both curves of every figure that was judged, and their difference."""

from __future__ import annotations

from html import escape
from pathlib import Path

from trimtab.report.curves import Line, chart
from trimtab.report.judgement import HEAD, Finding, Judgement, described, row_of, share
from trimtab.report.page import document, place, write_page
from trimtab.report.sections import sentence
from trimtab.report.subject import job_name

PAGE = "agreement.html"
SIDES = ("A", "B")


def write_judgement(judgement: Judgement, output: str | Path | None = None) -> Path:
    """Write the page and return its path: agreement.html in the second run's folder, or `output`."""
    return write_page(render(judgement), place(output, PAGE, judgement.b.folder))


def render(judgement: Judgement) -> str:
    body = "\n".join(section(judgement) for section in (_headline, _reasons, _errors, _curves))
    return document(
        f"{judgement.verdict}: {judgement.a.folder} and {judgement.b.folder}", body, [judgement.a, judgement.b]
    )


def _headline(judgement: Judgement) -> str:
    entries = "".join(
        f"<li><i class='swatch c{colour}'></i><b>{name}</b> <span>{escape(described(run))}</span></li>"
        for colour, (name, run) in enumerate(zip(SIDES, (judgement.a, judgement.b)))
    )
    return (
        f"<header><p class=eyebrow>{escape(job_name(judgement.a))}</p><h1>{escape(judgement.verdict)}</h1></header>"
        f"<ul class=runs>{entries}</ul>"
    )


def _reasons(judgement: Judgement) -> str:
    told = judgement.complaints or [
        "; ".join(map(_limits, judgement.findings)),
        "initial weights, trained parameters, data and their order, seed and settings are the same",
    ]
    if judgement.same_answers:
        told = [*told, "both learnt from the same recorded answers"]
    entries = "".join(f"<li>{sentence(_capital(words))}.</li>" for words in told)
    allowed = "".join(f"<li>{sentence(_capital(words))}</li>" for words in judgement.differences.allowed)
    reasons = f"<ul class='findings{' calm' if judgement.passes else ''}'>{entries}</ul>"
    return reasons + (f"<h2>Differences that may be</h2><ul class='findings calm'>{allowed}</ul>" if allowed else "")


def _limits(found: Finding) -> str:
    if found.as_recorded:
        return f"{found.words}, which is not judged"
    first = found.judged.first
    own = f", at first within {share(first)}" if first is not None else ""
    return f"{found.judged.words} within {share(found.tolerance)}{own}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _errors(judgement: Judgement) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row_of(found))}</tr>" for found in judgement.findings
    )
    return (
        "<h2>Errors</h2><p class=words>B against A. Weighted: the sum of differences over the sum of A's values.</p>"
        f'<div class="card scroll"><table class="data sides"><tr>{head}</tr>{rows}</table></div>'
    )


def _curves(judgement: Judgement) -> str:
    drawn = "".join(_charts(found) for found in judgement.findings)
    return f"<h2>Curves and their difference</h2><div class=charts>{drawn}</div>"


def _charts(found: Finding) -> str:
    name = _capital(found.words)
    curves = [
        Line(side, [(spot.step, value) for spot, value in zip(found.places, values)], "only", colour)
        for colour, (side, values) in enumerate(
            zip(SIDES, ([spot.a for spot in found.places], [spot.b for spot in found.places]))
        )
    ]
    apart = [(spot.step, spot.difference) for spot in found.places]
    return chart(name, curves) + chart(f"{name}, B less A", [Line("B less A", apart, "only", 2)], level=0.0)
