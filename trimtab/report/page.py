"""One HTML page about one run: what was trained, how it went, what to look at twice.

The page is built from a `Run`; a section is a function from `Run` to HTML and returns "" when it has nothing to say.
Everything that comes from a file passes through `escape`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from trimtab import __version__
from trimtab.report.curves import Line, chart, short_number, smooth
from trimtab.report.findings import findings, loss_ends
from trimtab.report.read import Run, finite, read_run
from trimtab.report.style import STYLE

PAGE = "report.html"
JOB_NAMES = {"sft": "Supervised fine-tuning"}
MOST_SAMPLES = 50
MOST_ITEMS = 4


def write_report(run_folder: str | Path) -> Path:
    """Write report.html into the run's folder and return its path."""
    run = read_run(run_folder)
    target = run.folder / PAGE
    unfinished = target.with_suffix(".html.part")
    unfinished.write_text(render(run), encoding="utf-8", errors="replace")
    os.replace(unfinished, target)
    return target


def render(run: Run) -> str:
    """The whole page as text."""
    sections = (_headline, _figures, _findings, _curves, _samples, _data, _configuration, _provenance)
    body = "\n".join(section(run) for section in sections)
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_subject(run))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<footer>Written by trimtab {escape(__version__)} from {escape(str(run.folder.resolve()))}.</footer>\n"
        "</body>\n</html>\n"
    )


def _headline(run: Run) -> str:
    job = str(run.manifest.get("job", "sft"))
    count = finite(run.data.get("rows_kept"))
    parts = [f"on {short_number(count)} rows of {_dataset(run)}" if count is not None else f"on {_dataset(run)}"]
    if run.rows:
        epochs = run.last("epoch")
        parts.append(_plural(len(run.rows), "step") + (f", epoch {epochs:.3g}" if epochs is not None else ""))
    device = run.manifest.get("device")
    if device is not None:
        dtype = run.manifest.get("dtype")
        parts.append(f"{_plain(device)}{f', {_plain(dtype)}' if dtype is not None else ''}")
    return (
        f"<header><p class=eyebrow>{escape(JOB_NAMES.get(job, job))}</p>"
        f"<h1>{escape(_subject(run))}</h1><p class=lead>{escape(' · '.join(parts))}</p></header>"
    )


def _subject(run: Run) -> str:
    return f"{_short_name(run.options.get('pretrain'), 'a model')} → {_short_name(str(run.folder.resolve()), 'run')}"


def _dataset(run: Run) -> str:
    names = [_short_name(name, "") for name in str(run.options.get("dataset") or "").split(",")]
    return ", ".join(name for name in names if name) or "its data"


def _figures(run: Run) -> str:
    ends = loss_ends(run)
    figures: list[tuple[str, str, str]] = []
    if ends is not None:
        figures.append(("final loss", short_number(ends[1]), f"from {short_number(ends[0])}"))
    evaluation = run.last("eval_loss")
    if evaluation is not None:
        figures.append(("evaluation loss", short_number(evaluation), ""))
    seconds, tokens, trained = run.total("seconds"), run.total("tokens"), run.total("trained_tokens")
    if seconds:
        figures.append(("training time", _duration(seconds), ""))
    if tokens:
        figures.append(("tokens", short_number(tokens), f"{trained / tokens:.0%} trained on" if trained else ""))
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


def _findings(run: Run) -> str:
    sentences = findings(run)
    if not sentences:
        return "<ul class='findings calm'><li>Nothing unusual was found in this run.</li></ul>"
    return f"<ul class=findings>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _curves(run: Run) -> str:
    if not run.rows:
        return ""
    losses = run.series("loss")
    window = max(1, len(losses) // 25) | 1
    lines = [Line("each step", losses, "raw" if window > 1 else "only")]
    if window > 1:
        lines.append(Line(f"mean of {window} steps", smooth(losses, window), "smooth"))
    lines.append(Line("evaluation", run.series("eval_loss"), "dots"))
    charts = [
        chart("Loss", lines, tall=True),
        chart("Learning rate", [Line("learning rate", run.series("learning_rate"))]),
        chart("Gradient norm", [Line("gradient norm", run.series("grad_norm"))], "before clipping"),
        chart("Tokens a second", [Line("tokens a second", run.series("tokens_per_second"))]),
        chart("Memory", [Line("memory", run.series("memory_gib"))], "GiB"),
    ]
    return f"<h2>Curves</h2><div class=charts>{''.join(charts)}</div>"


def _samples(run: Run) -> str:
    if not run.samples:
        return ""
    columns = [name for name in ("prompt", "before", "after", "reference") if any(name in row for row in run.samples)]
    head = "".join(f"<th>{name.capitalize()}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(_sample_cell(sample, name) for name in columns)}</tr>" for sample in run.samples[:MOST_SAMPLES]
    )
    return (
        "<h2>Answers before and after</h2><div class=card><table class=samples>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _sample_cell(sample: dict[str, Any], name: str) -> str:
    text, verdict = _plain(sample.get(name, "")), ""
    reference = sample.get("reference")
    if name in ("before", "after") and isinstance(reference, str) and reference:
        verdict = " class=right" if text.strip() == reference.strip() else " class=wrong"
    shown = escape(text) if text.strip() else "<i class=empty>empty</i>"
    return f"<td data-name={name.capitalize()}><span{verdict}>{shown}</span></td>"


def _data(run: Run) -> str:
    if not run.data:
        return ""
    names = {
        "rows_read": "rows read",
        "rows_kept": "rows kept",
        "rows_truncated": "rows cut to the longest length",
        "rows_over_long": "rows left out: too long",
        "rows_empty": "rows left out: empty",
        "tokens": "tokens",
        "trained_tokens": "tokens trained on",
    }
    evaluation = run.data.get("evaluation")
    sets = {"Training": {key: value for key, value in run.data.items() if key != "evaluation"}}
    if isinstance(evaluation, dict):
        sets["Evaluation"] = evaluation
    flat = [dict(_flatten(values, leave_out=("what",))) for values in sets.values()]
    keys = dict.fromkeys([*(key for key in names if any(key in values for values in flat)), *flat[0], *flat[-1]])
    rows = "".join(
        f"<tr><td>{escape(names.get(key, key.replace('_', ' ')))}</td>"
        f"{''.join(f'<td>{escape(_count(values.get(key)))}</td>' for values in flat)}</tr>"
        for key in keys
    )
    head = f"<tr><th></th>{''.join(f'<th>{name}</th>' for name in sets)}</tr>"
    return f"<h2>Data</h2><div class=card><table class=data>{head}{rows}</table></div>"


def _configuration(run: Run) -> str:
    if not run.options:
        return ""
    lead = ("pretrain", "dataset", "max_epochs", "train_batch_size", "learning_rate", "lr_scheduler", "max_len", "seed")
    first = [(name, run.options[name]) for name in lead if name in run.options]
    return (
        f"<h2>Configuration</h2><div class=card>{_pairs(first)}</div>"
        f"<details><summary>All {len(run.options)} options</summary>"
        f"<div class=card>{_pairs(_flatten(run.options))}</div></details>"
    )


def _provenance(run: Run) -> str:
    pairs = _in_words(_flatten(run.manifest, leave_out=("data",)))
    if not pairs:
        return ""
    return f"<details><summary>Versions and hashes</summary><div class=card>{_pairs(pairs)}</div></details>"


def _flatten(mapping: dict[Any, Any], leave_out: Iterable[str] = (), prefix: str = "") -> list[tuple[str, Any]]:
    left_out = set(leave_out)
    pairs: list[tuple[str, Any]] = []
    for key, value in mapping.items():
        if key in left_out:
            continue
        if isinstance(value, dict):
            pairs += _flatten(value, prefix=f"{prefix}{key} · ")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _in_words(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name.replace("_", " "), value) for name, value in pairs]


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd></div>" for name, value in pairs)
    return f"<dl class=pairs>{rows}</dl>"


def _plain(value: Any) -> str:
    """A value as a person would write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        more = f" and {len(value) - MOST_ITEMS} more" if len(value) > MOST_ITEMS else ""
        return ", ".join(map(_plain, value[:MOST_ITEMS])) + more
    return str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if type(value) is int else _plain(value)


def _short_name(path: Any, otherwise: str) -> str:
    """The end of a path or hub name: enough to recognise it, short enough for a headline."""
    parts = [part for part in str(path or "").strip().replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-2:]) or otherwise


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
