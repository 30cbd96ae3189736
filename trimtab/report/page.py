"""HTML pages: the report of one run, and the document around every page. A report has no script and fetches nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from trimtab import __version__
from trimtab.files import write_bytes, writing
from trimtab.report import sections
from trimtab.report.assets import STYLE
from trimtab.report.distributions import distribution_section, reward_section, tail_section
from trimtab.report.rollouts import browser_section, rollout_section
from trimtab.report.run_data import RunData, read_run
from trimtab.report.summary import subject
from trimtab.report.time_line import lane_section, time_section

PAGE = "report.html"
SECTIONS: dict[str, Callable[[RunData], str]] = {
    "head": sections.headline,
    "figures": sections.key_figures,
    "findings": sections.warnings,
    "what": sections.what,
    "layout": sections.layout_section,
    "curves": sections.curves,
    "spread": distribution_section,
    "rewards": reward_section,
    "tail": tail_section,
    "samples": sections.samples,
    "answers": rollout_section,
    "browser": browser_section,
    "data": sections.data,
    "lanes": lane_section,
    "time": time_section,
    "pace": sections.pace,
    "configuration": sections.configuration,
    "provenance": sections.provenance,
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
