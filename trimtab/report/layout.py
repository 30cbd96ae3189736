"""Where the roles of a run on a cluster were."""

from html import escape
from typing import Any

from trimtab.report.numbers import plain
from trimtab.report.read import Run

COLUMNS = ("role", "nodes", "processes", "devices")


def layout_section(run: Run) -> str:
    layout = run.manifest.get("layout")
    rows = [row for row in layout if isinstance(row, dict)] if isinstance(layout, list) else []
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in COLUMNS)}</tr>" for row in rows)
    return f"<h2>Where it ran</h2><div class=card><table class=data><tr>{head}</tr>{body}</table></div>"


def _cell(value: Any) -> str:
    return "" if value is None else escape(plain(value))
