"""The section about the worst answers of a run: what its held-out evaluations came to (evaluate/tail_files.py)."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from trimtab.report.numbers import short_number
from trimtab.report.read import Run

SUMMARIES = "info_eval_*.json"


def tail_section(run: Run) -> str:
    parts = []
    for path in sorted(run.folder.glob(SUMMARIES)):
        try:
            parts.append(_table(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            parts.append(f"<p class=words>{escape(path.name)} cannot be read.</p>")
    return f"<h2>Held-out samples</h2>{''.join(parts)}" if parts else ""


def _table(figures: dict[str, Any]) -> str:
    rows = [(name, figures[key]) for name, key in (("mean reward", "reward"), ("mean return", "return"))]
    rows.append(("KL to the start, a token", figures["kl_per_token"]))
    rows += [(f"share below {threshold}", found) for threshold, found in figures["below"].items()]
    rows += [(f"mean of the worst {found['k']} (CVaR {level})", found) for level, found in figures["cvar"].items()]
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{_estimate(found)}</td></tr>" for name, found in rows)
    told = f"{figures['samples']:,} samples, the worst with a reward of {short_number(figures['worst_reward'])}; "
    told += "in brackets 95 % intervals."
    return f"<p class=words>{told}</p><div class=card><table class=data>{cells}</table></div>"


def _estimate(found: dict[str, float]) -> str:
    return f"{short_number(found['value'])} ({short_number(found['low'])} to {short_number(found['high'])})"
