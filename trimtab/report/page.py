"""The page about one run: its sections, functions from `RunData` to HTML that return "" when there is nothing to say,
and the document around every page. Everything that comes from a file passes through `escape`. A report has no script
and fetches nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trimtab import __version__
from trimtab.files import write_bytes, writing
from trimtab.report.assets import STYLE
from trimtab.report.charts import (
    BOUNDS,
    EVALUATION,
    Line,
    Panel,
    chart,
    objective_panels,
    pace_panels,
    smooth,
    window_of,
)
from trimtab.report.distributions import accuracy_of, are_held_out, distribution_section, reward_section, tail_section
from trimtab.report.findings import findings
from trimtab.report.formatting import count, duration, percent, plain, short_number, table
from trimtab.report.rollouts import browser_section, rollout_section, shortened
from trimtab.report.run_data import Point, RunData, finite, read_run
from trimtab.report.summary import achieved, chosen_options, facts, job_name, lead, subject, summary
from trimtab.report.time_line import lane_section, time_section

MOST_SAMPLES = 50
FEW_POINTS = 3
"""Up to this many equal values count as a curve that may still change."""
SHORT_ANSWER = 40
"""Characters up to which an answer is right or wrong; a longer one may say the same in other words."""
LENGTHS = {
    "min": "shortest",
    "p50": "half are up to",
    "p90": "90 % are up to",
    "p99": "99 % are up to",
    "max": "longest",
}


def headline(run: RunData) -> str:
    told = summary(run) if run.is_rl else ""
    return (
        f"<header><p class=eyebrow>{escape(job_name(run))}</p>"
        f"<h1>{escape(subject(run))}</h1><p class=lead>{escape(lead(run))}</p>"
        f"{f'<p class=told>{escape(told)}</p>' if told else ''}</header>"
    )


def key_figures(run: RunData) -> str:
    """The few numbers one asks for first."""
    figures = achieved(run) if run.is_rl else _loss_figures(run)
    seconds, tokens, trained = run.total("seconds"), run.total("tokens"), run.total("trained_tokens")
    if seconds:
        figures.append(("training time", duration(seconds), ""))
    if tokens:
        figures.append(
            ("tokens", short_number(tokens), f"{percent(trained / tokens, 0)} trained on" if trained else "")
        )
    if seconds and tokens:
        figures.append(("tokens a second", short_number(tokens / seconds), ""))
    memory = max((value for _, value in run.series("memory_gib")), default=None)
    if memory is not None:
        figures.append(("peak memory", f"{short_number(memory)} GiB", ""))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(note)}</dd></div>"
        for name, value, note in figures
    )
    return f"<dl class=figures>{cells}</dl>" if cells else ""


def _loss_figures(run: RunData) -> list[tuple[str, str, str]]:
    figures = []
    change = run.change("loss")
    if change is not None:
        figures.append(("final loss", short_number(change[1]), f"from {short_number(change[0])} at first"))
    evaluation = run.last("eval_loss")
    if evaluation is not None:
        figures.append(("evaluation loss", short_number(evaluation), ""))
    return figures + _accuracy(run)


def _accuracy(run: RunData) -> list[tuple[str, str, str]]:
    stored = accuracy_of(run.pairs)
    if stored is not None:
        low, high = stored.interval
        name = f"{run.held_out} accuracy" if are_held_out(run) else "accuracy"
        return [(name, percent(stored.share), f"{percent(low)} to {percent(high)}")]
    evaluated, change = run.last("eval_accuracy"), run.change("accuracy")
    if evaluated is not None:
        return [(f"{run.held_out} accuracy", percent(evaluated), "")]
    return [("accuracy", percent(change[1]), f"from {percent(change[0])} at first")] if change is not None else []


def warnings(run: RunData) -> str:
    return finding_list(findings(run))


def finding_list(sentences: Sequence[str]) -> str:
    if not sentences:
        return "<ul class='findings calm'><li>Nothing unusual was found in this run.</li></ul>"
    return f"<ul class=findings>{''.join(f'<li>{sentence(one)}</li>' for one in sentences)}</ul>"


def sentence(text: str) -> str:
    """A sentence as HTML, its --options in one piece."""
    return re.sub(r"(?<!\S)--\w+", r"<code>\g<0></code>", escape(text))


def what(run: RunData) -> str:
    known = facts(run)
    return f"<h2>What was trained</h2><div class=card>{pairs(known, 'facts')}</div>" if run.options else ""


def curves(run: RunData) -> str:
    if not run.rows:
        return ""
    pictures = objective_panels([run])
    flat = {picture.title: level for picture in pictures if (level := flat_level(run, picture)) is not None}
    drawn = "".join(_chart(run, picture) for picture in pictures if picture.title not in flat)
    told = f"Always the same: {'; '.join(f'{title.lower()} {level}' for title, level in flat.items())}." if flat else ""
    return f"<h2>Curves</h2><div class=charts>{drawn}</div><p class='words flat'>{escape(told)}</p>"


def flat_level(run: RunData, picture: Panel) -> str | None:
    """The value that everything in a picture has all the time, if it has one; a loss or a reward is always drawn."""
    found = [point[1] for name in picture.metrics for kind in ("", EVALUATION) for point in run.series(f"{kind}{name}")]
    if picture.tall or picture.title == "Reward" or len(found) < FEW_POINTS or min(found) < max(found):
        return None
    return percent(found[0]) if picture.share else short_number(found[0])


def pace(run: RunData) -> str:
    if not run.steps:
        return ""
    drawn = "".join(_chart(run, picture, plainly=True) for picture in pace_panels([run]))
    return f"<h2>Speed, memory and the optimiser</h2><div class=charts>{drawn}</div>"


def _chart(run: RunData, picture: Panel, plainly: bool = False) -> str:
    """Every metric of a picture as single steps, their mean and evaluation points. `plainly`: without a legend."""
    lines: list[Line] = []
    means: list[list[Point]] = []
    several = len(picture.metrics) > 1
    notes = [picture.note] if picture.note else []
    for index, (metric, name) in enumerate(picture.metrics.items()):
        points, evaluation = run.series(metric), run.series(f"{EVALUATION}{metric}")
        low, high = (run.series(f"{EVALUATION}{metric}{end}") for end in BOUNDS)
        if low:
            notes.append("shaded: 95 % interval")
        window = 1 if metric in ("learning_rate", "memory_gib") else window_of(points)
        means.append(smooth(points, window))
        if not points:
            lines += evaluation_only(name, evaluation, index, low, high)
            continue
        if window > 1:
            each, mean = (name, name) if several else (f"each {run.unit}", f"mean of {window} {run.unit}s")
            lines.append(Line(each, points, "raw", index, in_legend=not several and not plainly))
            lines.append(Line(mean, means[-1], "smooth", index, in_legend=several or not plainly))
        else:
            lines.append(Line(name if several else f"each {run.unit}", points, "only", index))
        lines.append(
            Line(
                f"{name}, evaluation" if several else "evaluation",
                evaluation,
                "dots",
                index if several else 1,
                in_legend=not several,
                low=low,
                high=high,
            )
        )
        if several and evaluation and "dots: evaluation" not in notes:
            notes.append("dots: evaluation")
    lines += _limit_line(run, picture, lines)
    band = (means[0], means[1]) if picture.band and all(means) else None
    return chart(
        picture.title,
        lines,
        "; ".join(dict.fromkeys(notes)),
        tall=picture.tall,
        share=picture.share,
        level=picture.level,
        band=band,
    )


def evaluation_only(name: str, points: list[Point], series: int, low: list[Point], high: list[Point]) -> list[Line]:
    """What only evaluations measure: dots, joined so that their way can be seen."""
    joined = Line(name, points, "only", series, low=low, high=high)
    return [joined, Line(name, points, "dots", series, in_legend=False)]


def _limit_line(run: RunData, picture: Panel, lines: list[Line]) -> list[Line]:
    """The option that bounds a picture's values, once they come near it."""
    limit, numbers = finite(run.options.get(picture.limit)), [point for line in lines for point in line.points]
    if limit is None or max((value for _, value in numbers), default=0.0) < limit / 2:
        return []
    ends = min(step for step, _ in numbers), max(step for step, _ in numbers)
    return [Line("limit", [(step, limit) for step in ends], "level")]


def samples(run: RunData) -> str:
    if not run.samples:
        return ""
    columns = [name for name in ("prompt", "before", "after", "reference") if any(name in row for row in run.samples)]
    head = "".join(f"<th>{name.capitalize()}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(sample_cell(sample, name, name.capitalize()) for name in columns)}</tr>"
        for sample in run.samples[:MOST_SAMPLES]
    )
    return (
        "<h2>Answers before and after</h2><div class=card><table class=samples>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def sample_cell(sample: dict[str, Any], name: str, title: str) -> str:
    text, verdict = plain(sample.get(name, "")), ""
    reference = sample.get("reference")
    if name in ("before", "after") and isinstance(reference, str) and 0 < len(reference) <= SHORT_ANSWER:
        verdict = " class=right" if text.strip() == reference.strip() else " class=wrong"
    shown = escape(shortened(text)) if text.strip() else "<i class=empty>empty</i>"
    return f'<td data-name="{escape(title)}"><span{verdict}>{shown}</span></td>'


def layout_section(run: RunData) -> str:
    """Placement of the roles on a cluster."""
    layout, names = run.manifest.get("layout"), ("role", "nodes", "processes", "devices")
    found = [row for row in layout if isinstance(row, dict)] if isinstance(layout, list) else []
    rows = [["" if row.get(name) is None else plain(row[name]) for name in names] for row in found]
    return f"<h2>Where it ran</h2>{table(names, rows, 'data', 'card')}" if rows else ""


def data(run: RunData) -> str:
    if not run.data:
        return ""
    names = {
        "rows_read": f"{run.noun} read",
        "rows_kept": f"{run.noun} kept",
        "rows_truncated": f"{run.noun} cut to the longest length",
        "rows_over_long": f"{run.noun} left out: too long",
        "rows_empty": f"{run.noun} left out: nothing to learn",
        "rows_also_trained": f"{run.noun} whose prompt is trained on too",
        "rows_equal": "pairs whose two sides are the same",
        "rows_desirable": "desirable answers",
        "prompts_shared": "pairs that share their prompt",
        "tokens": "tokens",
        "trained_tokens": "steps to judge" if run.job == "prm" else "tokens trained on",
        "tokens_shared": "tokens both sides begin with, read once",
        "max_len": "longest length allowed",
        **{f"lengths · {name}": f"length: {words}" for name, words in LENGTHS.items()},
    }
    evaluation = run.data.get("evaluation")
    sets = {"Training": {key: value for key, value in run.data.items() if key != "evaluation"}}
    if isinstance(evaluation, dict):
        sets["Evaluation"] = evaluation
    left_out = ("what", "layout", *(("trained_tokens",) if run.is_rl else ()))  # no token of a prompt is trained on
    flat = [dict(flatten(values, leave_out=left_out)) for values in sets.values()]
    keys = dict.fromkeys([*(key for key in names if any(key in values for values in flat)), *flat[0], *flat[-1]])
    rows = [(names.get(key, str(key).replace("_", " ")), *(_counted(values, key) for values in flat)) for key in keys]
    layout = run.data.get("layout")
    told = f"<p class=words>Read as {escape(layout)}.</p>" if isinstance(layout, str) and layout else ""
    return f"<h2>Data</h2>{told}{table(('', *sets), rows, 'data', 'card')}"


def _counted(values: dict[str, Any], key: str) -> str:
    """A count, with its share where it is a part of something."""
    wholes = {"trained_tokens": "tokens", "tokens_shared": "tokens", "rows_desirable": "rows_kept"}
    wholes |= {
        "rows_also_trained": "rows_kept",
        "rows_truncated": "rows_kept",
        "rows_equal": "rows_kept",
        "prompts_shared": "rows_kept",
    }
    wholes |= {"rows_kept": "rows_read", "rows_over_long": "rows_read", "rows_empty": "rows_read"}
    part, whole = finite(values.get(key)), finite(values.get(wholes.get(key, "")))
    share = f" ({percent(part / whole)})" if part and whole and 0 < part < whole else ""
    return f"{count(values.get(key))}{share}"


def configuration(run: RunData) -> str:
    if not run.options:
        return ""
    chosen = chosen_options(run)
    rest = {name: value for name, value in run.options.items() if name not in chosen}
    told = "Options that are not at their default:" if chosen else "Every option is at its default."
    shown = f"<div class=card>{pairs(flatten(chosen))}</div>" if chosen else ""
    others = f"<div class=card>{pairs(flatten(rest))}</div>"
    folded = f"<details><summary>The other {len(rest)} options</summary>{others}</details>" if rest else ""
    return f"<h2>Configuration</h2><p class=words>{told}</p>{shown}{folded}"


def provenance(run: RunData) -> str:
    known = [(name.replace("_", " "), value) for name, value in flatten(run.manifest, leave_out=("data", "layout"))]
    if not known:
        return ""
    return f"<details><summary>Versions and hashes</summary><div class=card>{pairs(known)}</div></details>"


def flatten(mapping: dict[Any, Any], leave_out: Iterable[str] = (), prefix: str = "") -> list[tuple[str, Any]]:
    left_out = set(leave_out)
    found: list[tuple[str, Any]] = []
    for name, value in mapping.items():
        if name in left_out:
            continue
        if isinstance(value, dict):
            found += flatten(value, prefix=f"{prefix}{name} · ")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def pairs(known: Iterable[tuple[str, Any]], kind: str = "pairs") -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(plain(value))}</dd></div>" for name, value in known)
    return f"<dl class={kind}>{rows}</dl>"


# ---- pages

PAGE = "report.html"
SECTIONS: dict[str, Callable[[RunData], str]] = {
    "head": headline,
    "figures": key_figures,
    "findings": warnings,
    "what": what,
    "layout": layout_section,
    "curves": curves,
    "spread": distribution_section,
    "rewards": reward_section,
    "tail": tail_section,
    "samples": samples,
    "answers": rollout_section,
    "browser": browser_section,
    "data": data,
    "lanes": lane_section,
    "time": time_section,
    "pace": pace,
    "configuration": configuration,
    "provenance": provenance,
}
"""In their order, by the names that the live page gives them."""


def write_report(run_folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the page about a run and return its path: report.html in the run's folder, or `output`."""
    run = read_run(run_folder)
    return write_page(render(run), place(output, PAGE, run.folder))


def render(run: RunData) -> str:
    """The whole page as text."""
    return static_page(subject(run), [section(run) for section in SECTIONS.values()], [run.folder])


def static_page(title: str, parts: Sequence[str], folders: Sequence[Path]) -> str:
    """A page that stands alone in a file; `folders`: of the runs it was made of."""
    listed = ", ".join(str(folder.resolve()) for folder in folders)
    return document(title, "\n".join(parts) + "\n", f"Written by trimtab {__version__} from {listed}.")


def document(title: str, body: str, footer: str, *, head: str = f"<style>{STYLE}</style>", attributes: str = "") -> str:
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n{head}\n</head>\n<body{attributes}>\n{body}"
        f"<footer>{escape(footer)}</footer>\n</body>\n</html>\n"
    )


def place(output: str | Path | None, name: str, folder: Path) -> Path:
    """The path of a page: `name` in `folder`, or as `output`, a file or a folder, says."""
    if output is None:
        return folder / name
    return Path(output) / name if Path(output).is_dir() or str(output).endswith(("/", os.sep)) else Path(output)


def write_page(text: str, target: Path) -> Path:
    """Write a page, whole or not at all."""
    with writing(f"{target}: cannot write the report", "give --output a place to write to"):
        write_bytes(target, text.encode(errors="replace"))
    return target
