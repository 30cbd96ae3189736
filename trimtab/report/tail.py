"""The section about the worst answers of a run: what its held-out evaluations came to (evaluate/tail_files.py)."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

from trimtab.report.numbers import short_number
from trimtab.report.read import Run

LOGS = (("value", "probability"), ("low", "low"), ("high", "high"))
SUMMARIES = "info_eval_{}.json"


def tail_section(run: Run) -> str:
    parts = []
    for path in _summaries(run):
        try:
            parts.append(_table(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            parts.append(f"<p class=words>{escape(path.name)} cannot be read.</p>")
    return f"<h2>Held-out samples</h2>{''.join(parts)}" if parts else ""


def _summaries(run: Run) -> list[Path]:
    """In the run's folder all of them; where several runs write, its own."""
    elsewhere, name = run.options.get("save_info_path"), run.manifest.get("run_name")
    if elsewhere and name:
        path = Path(str(elsewhere)).expanduser() / SUMMARIES.format(name)
        if path.exists():
            return [path]
    return sorted(run.folder.glob(SUMMARIES.format("*")))


def _table(figures: dict[str, Any]) -> str:
    rows = [(name, figures[key]) for name, key in (("mean reward", "reward"), ("mean return", "return"))]
    rows.append(("KL to the start, a token", figures["kl_per_token"]))
    rows += [(f"share below {threshold}", found) for threshold, found in figures["below"].items()]
    for threshold, found in figures.get("rare_events", {}).items():
        of, effective = (short_number(found["importance"][f"effective_{kind}"]) for kind in ("samples", "bad_samples"))
        name = f"the same by the proposal's answers, weighed ({threshold}): {effective} effective bad samples, of {of}"
        rows.append((name, _as_shares(found["importance"])))
    rows += [(f"mean of the worst {found['k']} (CVaR {level})", found) for level, found in figures["cvar"].items()]
    clustered = "new_prompts" in figures["reward"]
    told = f"{figures['samples']:,} samples" + (f" for {figures['prompts']:,} prompts" if clustered else "")
    told += f", the worst with a reward of {short_number(figures['worst_reward'])}. 95 % intervals"
    told += (
        ": for new answers to these prompts, and for new prompts, of which fewer are known than of answers."
        if clustered
        else " speak of new answers to these prompts, not of new prompts."
    )
    for threshold, found in figures.get("rare_events", {}).items():
        if _apart(_as_shares(found["importance"]), found["plain"]):
            told += (
                f" Of the share below {threshold} the two estimates contradict each other: the proposal does not reach "
                "all that the policy says, so trust the plain one."
            )
    head = "".join(f"<th>{name}</th>" for name in ("", "", "these prompts", *(["new prompts"] if clustered else [])))
    cells = ""
    for name, found in rows:
        known = [short_number(found["value"]), _interval(found)]
        known += [_interval(found["new_prompts"])] if clustered else []
        cells += f"<tr><td>{escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in known)}</tr>"
    table = f"<table class='data sides'><tr>{head}</tr>{cells}</table>"
    return f"<p class=words>{told}</p><div class='card scroll'>{table}</div>"


def _as_shares(found: dict[str, Any]) -> dict[str, Any]:
    """An estimate in logarithms as one of probabilities; without a bad sample its logarithm is none."""
    shares: dict[str, Any] = {
        name: math.exp(value) if (value := found[f"log_{key}"]) is not None else 0.0
        for name, key in LOGS
        if f"log_{key}" in found
    }
    return shares | ({"new_prompts": _as_shares(found["new_prompts"])} if "new_prompts" in found else {})


def _apart(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first["high"] < second["low"] or second["high"] < first["low"]


def _interval(found: dict[str, Any]) -> str:
    if found["low"] is None or found["high"] is None:
        return "unknown"
    return f"{short_number(found['low'])} to {short_number(found['high'])}"
