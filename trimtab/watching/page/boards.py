"""What is on a page: sections by name, drawn anew when the run's files have changed, and which of them are new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from trimtab.report import sections as report
from trimtab.report.distributions import distribution_section
from trimtab.report.findings import warnings
from trimtab.report.lanes import lane_section
from trimtab.report.layout import layout_section
from trimtab.report.numbers import duration, short_name
from trimtab.report.read import Run
from trimtab.report.rewards import reward_section
from trimtab.report.subject import job_name, lead, subject
from trimtab.report.tail import tail_section
from trimtab.report.time_line import time_section
from trimtab.watching.followed import FollowedRun
from trimtab.watching.page.answers import answers
from trimtab.watching.page.tokens import TokenFile
from trimtab.watching.state import Condition, progress_of, state_of

SECTIONS: dict[str, Callable[[Run], str]] = {
    "figures": report.key_figures,
    "findings": lambda run: report.told([*warnings(run), *run.problems]),  # how far it is stands above
    "curves": report.curves,
    "answers": answers,
    "spread": distribution_section,
    "rewards": reward_section,
    "tail": tail_section,
    "samples": report.samples,
    "lanes": lane_section,
    "time": time_section,
    "pace": report.pace,
    "what": report.what,
    "layout": layout_section,
    "data": report.data,
    "configuration": report.configuration,
    "provenance": report.provenance,
}
"""The report's own, but for answers, of which a page that is served can show any iteration's."""


@dataclass
class Board:
    """Sections that can be asked for, again and again, from several threads."""

    every: float
    """Seconds between two looks at the files."""
    version: int = 0
    resting: float = 9.0
    """Seconds of rest for each second of drawing: on a machine whose cores a run needs, a page is the lesser thing."""
    sections: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The version since which a section has been as it is, and its HTML."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._not_before = 0.0

    def look(self) -> int:
        """Have the sections as the files are now, unless that was just done; their version."""
        with self._lock:
            if time.monotonic() >= self._not_before:
                began = time.thread_time()
                for name, html in self.draw().items():
                    if self.sections.get(name, (0, None))[1] != html:
                        self.sections[name] = (self.version + 1, html)
                self.version = max((version for version, _ in self.sections.values()), default=0)
                rest = self.resting * (time.thread_time() - began)
                self._not_before = time.monotonic() + max(0.9 * self.every, rest)
            return self.version

    def since(self, version: int) -> dict[str, str]:
        with self._lock:
            return {name: html for name, (changed, html) in self.sections.items() if changed > version}

    def draw(self) -> dict[str, str]:
        """Those sections that may have changed."""
        raise NotImplementedError


class RunBoard(Board):
    """One run."""

    def __init__(self, folder: Path, every: float):
        super().__init__(every)
        self.folder, self.tokens = folder, TokenFile(folder)
        self.followed = FollowedRun(folder)
        self._changed = True  # since it was drawn

    @property
    def name(self) -> str:
        return short_name(str(self.folder.resolve()), "run")

    def draw(self) -> dict[str, str]:
        self._refresh()
        drawn = {"head": head(self.followed)}
        if self._changed:
            run = self.followed.run
            drawn |= {name: section(run) if run.rows else "" for name, section in SECTIONS.items()}
            self._changed = False
        return drawn

    def _refresh(self) -> None:
        self._changed = self.followed.refresh() or self._changed

    def answers(self, step: int) -> str:
        with self._lock:
            return answers(self.followed.run, step)

    def entry(self, number: int) -> str:
        """The run in a list of several, as it is now; drawn whole it need not be."""
        with self._lock:
            self._refresh()
            followed = self.followed
            told = f"{job_name(followed.run)} · {lead(followed.run)}" if followed.begun else str(self.folder)
            figures = report.key_figures(followed.run) if followed.run.rows else ""
            return (
                f"<li class=card data-key={number}><h2><a href='/run/{number}'>{escape(self.name)}</a></h2>"
                f"<p class=words>{escape(told)}</p>{pill(followed)}{figures}</li>"
            )


class IndexBoard(Board):
    """Several runs."""

    def __init__(self, runs: Sequence[RunBoard], every: float):
        super().__init__(every)
        self.runs = runs

    def draw(self) -> dict[str, str]:
        entries = "".join(run.entry(number) for number, run in enumerate(self.runs, start=1))
        return {"runs": f"<header><h1>{len(self.runs)} runs</h1></header><ul class=index>{entries}</ul>"}


def head(followed: FollowedRun) -> str:
    """What is trained, and whether it still is."""
    run = followed.run
    if followed.begun:
        told = f"<p class=eyebrow>{escape(job_name(run))}</p><h1>{escape(subject(run))}</h1>"
        return f"<header>{told}<p class=lead>{escape(lead(run))}</p>{pill(followed)}</header>"
    name = escape(short_name(str(followed.folder.resolve()), "run"))
    where = escape(str(followed.folder))
    return (
        f"<header><p class=eyebrow>{name}</p><h1>No run here yet</h1>"
        f"<p class=lead>As soon as one begins in {where}, it will be shown here.</p>{pill(followed)}</header>"
    )


def pill(followed: FollowedRun) -> str:
    """Whether it works, how far it is, and since when it has said nothing."""
    state, progress = state_of(followed), progress_of(followed.run)
    words = [f"<b>{'waiting' if state.condition is Condition.AWAITED else state.condition}</b>"]
    if followed.run.rows:
        planned = f" of {progress.planned:,}" if progress.planned else ""
        words.append(f"{followed.run.unit} {progress.done:,}{planned}")
    if not state.is_over and progress.remaining:
        words.append(f"about {duration(progress.remaining)} to go")
    if followed.written is not None:
        words.append(f'last heard of <time data-since="{followed.written:.0f}"></time>')
    return f'<p class="pill {state.condition}">{" · ".join(words)}</p>'
