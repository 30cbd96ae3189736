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
        rows.append((f"the same by the proposal's answers, weighed ({threshold})", _as_shares(found["importance"])))
    rows += [(f"mean of the worst {found['k']} (CVaR {level})", found) for level, found in figures["cvar"].items()]
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{_estimate(found)}</td></tr>" for name, found in rows)
    told = f"{figures['samples']:,} samples, the worst with a reward of {short_number(figures['worst_reward'])}; "
    told += "in brackets 95 % intervals."
    for threshold, found in figures.get("rare_events", {}).items():
        if _apart(_as_shares(found["importance"]), found["plain"]):
            told += (
                f" Of the share below {threshold} the two estimates contradict each other: the proposal does not reach "
                "all that the policy says, so trust the plain one."
            )
    return f"<p class=words>{told}</p><div class=card><table class=data>{cells}</table></div>"


def _as_shares(found: dict[str, float | None]) -> dict[str, Any]:
    """An estimate in logarithms as one of probabilities; without a bad sample its logarithm is none."""
    shares = {name: math.exp(value) if (value := found[f"log_{key}"]) is not None else 0.0 for name, key in LOGS}
    return shares | {
        "effective": f"{short_number(found['effective_bad_samples'])} effective bad samples, of "
        f"{short_number(found['effective_samples'])} in all"
    }


def _apart(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first["high"] < second["low"] or second["high"] < first["low"]


def _estimate(found: dict[str, float]) -> str:
    text = f"{short_number(found['value'])} ({short_number(found['low'])} to {short_number(found['high'])})"
    return f"{text}, on {found['effective']}" if "effective" in found else text
