"""One HTML page about one run: what was trained, how it went, what to look at twice. No script, nothing fetched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from trimtab import __version__
from trimtab.files import write_bytes, writing
from trimtab.report import sections
from trimtab.report.assets import STYLE
from trimtab.report.distributions import distribution_section, reward_section, tail_section
from trimtab.report.rollouts import browser_section, rollout_section
from trimtab.report.run_data import RunData, read_run
from trimtab.report.sections import layout_section
from trimtab.report.summary import subject
from trimtab.report.time_line import lane_section, time_section

PAGE = "report.html"
SECTIONS = (
    sections.headline,
    sections.key_figures,
    sections.warnings,
    sections.what,
    layout_section,
    sections.curves,
    distribution_section,
    reward_section,
    tail_section,
    sections.samples,
    rollout_section,
    browser_section,
    sections.data,
    lane_section,
    time_section,
    sections.pace,
    sections.configuration,
    sections.provenance,
)


def write_report(run_folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the page about a run and return its path: report.html in the run's folder, or `output`."""
    run = read_run(run_folder)
    return write_page(render(run), place(output, PAGE, run.folder))


def render(run: RunData) -> str:
    """The whole page as text."""
    return document(subject(run), "\n".join(section(run) for section in SECTIONS), [run.folder])


def document(title: str, body: str, folders: Sequence[Path]) -> str:
    listed = ", ".join(str(folder.resolve()) for folder in folders)
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<footer>Written by trimtab {escape(__version__)} from {escape(listed)}.</footer>\n"
        "</body>\n</html>\n"
    )


def place(output: str | Path | None, name: str, folder: Path) -> Path:
    """Where a page goes: into `folder` under `name`, or where `output`, a file or a folder, says."""
    if output is None:
        return folder / name
    return Path(output) / name if Path(output).is_dir() or str(output).endswith(("/", os.sep)) else Path(output)


def write_page(text: str, target: Path) -> Path:
    """Whole or not at all."""
    with writing(f"{target}: cannot write the report", "give --output a place to write to"):
        write_bytes(target, text.encode(errors="replace"))
    return target
