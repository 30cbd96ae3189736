"""One run as lines of text for a terminal of any size: how it is doing, its curves, its time, its alarms, an answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from rich.text import Text

from trimtab.report.conversations import turns_of
from trimtab.report.findings import warnings
from trimtab.report.numbers import duration, percent, plural, short_number
from trimtab.report.read import finite
from trimtab.report.rollouts import figures
from trimtab.report.subject import job_name
from trimtab.report.time_line import phase_times
from trimtab.watching.answers import Answer, Shelf, harmless
from trimtab.watching.curves import Curve, curves_of
from trimtab.watching.followed import FollowedRun
from trimtab.watching.state import RECENT, Condition, Progress, State, progress_of, state_of

COLOURS = {
    Condition.AWAITED: "dim",
    Condition.STARTING: "cyan",
    Condition.RUNNING: "green",
    Condition.SILENT: "yellow",
    Condition.STOPPED: "red",
    Condition.FINISHED: "blue",
}
PHASE_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
NAMES = 14
"""Width of the names of curves."""
FEWEST_ANSWER_LINES = 6


@dataclass
class Watched:
    """A run, what was made of its files, and where in it a person is."""

    followed: FollowedRun
    shelf: Shelf = field(default_factory=Shelf)
    scrolled: int = 0
    """Lines of the answer that are above the window."""
    curves: list[Curve] = field(default_factory=list)
    alarms: list[tuple[bool, str]] = field(default_factory=list)
    """Whether it holds in the newest row, and what it says."""
    seconds: float = 0.0
    """Of all steps together."""
    _stale: bool = True
    _not_before: float = 0.0

    def refresh(self) -> None:
        """Look at the files. What takes long to make of a long run is made anew less often: a tenth of a core at most
        goes into it."""
        self._stale |= self.followed.refresh()
        began = time.monotonic()
        if self._stale and began >= self._not_before:
            self._digest()
            self._stale = False
            self._not_before = time.monotonic() + 9 * (time.monotonic() - began)

    def _digest(self) -> None:
        run = self.followed.run
        self.curves = curves_of(run)
        newest = run.rows[-1].get("alarms") if run.rows else None
        said = [str(text).strip().removesuffix(".").lower() for text in newest] if isinstance(newest, list) else []
        sentences = [*warnings(run), *run.problems]
        told = [(any(sentence.lower().startswith(text) for text in said), sentence) for sentence in sentences]
        self.alarms = sorted(told, key=lambda alarm: not alarm[0])
        self.shelf.fill(run)
        self.seconds = run.total("seconds")

    @property
    def state(self) -> State:
        return state_of(self.followed)

    @property
    def progress(self) -> Progress:
        return progress_of(self.followed.run)

    @property
    def name(self) -> str:
        return harmless(self.followed.folder)


def lines_of(watched: Watched, width: int, height: int | None) -> list[Text]:
    """At most `height` lines of at most `width` cells; None: as many as there is to say."""
    head = [*headline(watched, width), *_bar(watched, width)]
    spent = _time(watched, width)
    room = None if height is None else max(0, height - len(head) - len(spent))
    answer = _answer(watched.shelf.shown(), watched, width)
    other = _answer(watched.shelf.other(), watched, width)
    # The curves first; then alarms, and what is left is the answer's.
    kept = 0 if room is None or not answer else min(FEWEST_ANSWER_LINES, len(answer), room // 2)
    most = len(watched.curves) if room is None else max(1, (room - kept) * 2 // 3)
    curves = [_curve(curve, width) for curve in watched.curves[:most]]
    left = None if room is None else max(0, room - kept - len(curves))
    alarms = _alarms(watched, width, left)
    if left is None:
        return [*head, *curves, *spent, *alarms, *answer, *other]
    room = left - len(alarms) + kept
    answer = _window(watched, answer, room)
    if len(answer) + 1 + min(3, len(other)) <= room:
        answer += [Text(), *other]
    return [*head, *curves, *spent, *alarms, *answer][:height]


def headline(watched: Watched, width: int) -> list[Text]:
    """The name of the run and how it is doing."""
    run, state, progress = watched.followed.run, watched.state, watched.progress
    name = Text().append(watched.name, style="bold")
    if watched.followed.begun:
        model = harmless(run.options.get("pretrain") or "")
        name.append(f"  {harmless(job_name(run))}{f' · {model}' if model else ''}", style="dim")
    line = Text()
    line.append("● " + state.in_words, style=COLOURS[state.condition])
    if watched.followed.begun:
        of = f" of {progress.planned:,}" if progress.planned else ""
        line.append(f"   {run.unit} {progress.done:,}{of}")
        epoch = finite(run.rows[-1].get("epoch")) if run.rows else None
        line.append(f"   epoch {epoch:.2f}" if epoch is not None else "")
    if state.condition is Condition.RUNNING and run.rows:
        line.append(f"   last row {duration(state.quiet)} ago", style="dim")
    elif state.is_over and watched.seconds:
        line.append(f"   took {duration(watched.seconds)}", style="dim")
    return [_cut(name, width), _cut(line, width)]


def _bar(watched: Watched, width: int) -> list[Text]:
    progress, state = watched.progress, watched.state
    if progress.share is None or not watched.followed.run.rows:
        return []
    words = f" {percent(progress.share, 0)}"
    if progress.seconds is not None:
        words += f"  {duration(progress.seconds)} each"
    if progress.remaining and not state.is_over:
        words += f"  {duration(progress.remaining)} to go"
    cells = max(10, min(60, width - len(words) - 1))
    full = round(progress.share * cells)
    line = Text().append("━" * full, style=COLOURS[state.condition])
    line.append("─" * (cells - full), style="dim")
    return [_cut(line.append(words), width)]


def _curve(curve: Curve, width: int) -> Text:
    figures = f" {curve.last}"
    before = f"  from {curve.first}" if len(curve.points) > 1 else ""
    room = max(4, min(60, width - NAMES - 24))
    line = Text(f"{curve.name:<{NAMES - 1}.{NAMES - 1}} ")
    line.append(f"{curve.drawn(room):<{room}}", style="cyan")
    line.append(figures, style="bold").append(before, style="dim")
    return _cut(line, width)


def _time(watched: Watched, width: int) -> list[Text]:
    """Where the seconds of late went, memory, speed, and what is under way."""
    run = replace(watched.followed.run, rows=watched.followed.run.rows[-RECENT:])
    lines = []
    phases, times = phase_times(run)
    spent = [sum(seconds[place] for _, seconds in times) for place in range(len(phases))]
    if sum(spent) > 0:
        line = Text(f"{'time':<{NAMES}}")
        for place, (phase, seconds) in enumerate(zip(phases, spent)):
            style = PHASE_COLOURS[place % len(PHASE_COLOURS)]
            if seconds:
                line.append("■ ", style=style).append(f"{harmless(phase)} ")
                line.append(f"{percent(seconds / sum(spent), 0)}  ", style="bold")
        lines.append(_cut(line, width))
    newest = {name: run.last(name) for name in ("memory_gib", "tokens_per_second", "under_way", "waiting")}
    newest |= {name: run.last(name) for name in ("engine_busy", "age_max", "failed_episodes")}
    words = {
        "memory_gib": lambda value: f"memory {value:.2f} GiB",
        "tokens_per_second": lambda value: f"{short_number(value)} tokens/s",
        "under_way": lambda value: f"{plural(int(value), 'group')} under way",
        "age_max": lambda value: f"oldest {plural(int(value), 'update')} old",
        "engine_busy": lambda value: f"engines busy {percent(value, 0)}",
        "waiting": lambda value: f"trainer waiting {percent(value, 0)}",
        "failed_episodes": lambda value: f"{plural(int(value), 'episode')} failed" if value else "",
    }
    told = [say(found) for name, say in words.items() if (found := newest[name]) is not None]
    for words_of_line in _filled([text for text in told if text], width - NAMES):
        lines.append(_cut(Text(" " * NAMES + words_of_line), width))
    return lines


def _filled(texts: list[str], width: int) -> list[str]:
    """Texts side by side, in as many lines as they need."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"  {text}"
        else:
            lines.append(text)
    return lines


def _alarms(watched: Watched, width: int, most: int | None) -> list[Text]:
    """The gravest first; where lines are few, each gets one."""
    found = []
    for now, sentence in watched.alarms:
        mark, style = ("! ", "bold red") if now else ("! ", "yellow")
        text = Text(mark + harmless(sentence).replace("\n", " "), style=style)
        found.append(_wrapped(text, width))
    if most is not None and sum(map(len, found)) > most:
        found = [[_cut(lines[0], width, more=len(lines) > 1)] for lines in found[:most]]
    return [line for lines in found for line in lines]


def _answer(answer: Answer | None, watched: Watched, width: int) -> list[Text]:
    """A line about an answer, and its text."""
    if answer is None:
        return []
    lines = [_cut(_title(answer, watched), width)]
    turns = turns_of(answer.row)
    prompt = Text(harmless(answer.row.get("prompt", "")).strip("\n"), style="dim")
    lines += _wrapped(prompt, width)
    if not turns:
        lines += _wrapped(Text(harmless(answer.row.get("response", "")) or "(empty)"), width)
    for turn in turns:
        drawn, reward = bool(turn.get("drawn")), finite(turn.get("reward"))
        role = "model" if drawn else harmless(turn.get("role", "")) or "world"
        text = Text().append(f"{role}: ", style="bold green" if drawn else "bold")
        text.append(harmless(turn.get("text", "")).strip("\n"), style="" if drawn else "dim")
        if drawn and reward:
            text.append(f"  {reward:+.3g}", style="bold")
        lines += _wrapped(text, width)
    return lines


def _title(answer: Answer, watched: Watched) -> Text:
    reward, facts = figures(answer.row)
    line = Text().append(f"{answer.kind} ", style="bold green" if answer.kind == "best" else "bold red")
    if answer.of > 1:
        line.append(f"{answer.number} of {answer.of} ")
    line.append(f"of {watched.followed.run.unit} {answer.step}  ")
    line.append(reward, style="bold")
    return line.append(harmless("  " + ", ".join(facts)), style="dim")


def _window(watched: Watched, answer: list[Text], room: int) -> list[Text]:
    """The part of an answer that fits, under its title."""
    if len(answer) <= room:
        watched.scrolled = 0
        return answer
    watched.scrolled = max(0, min(watched.scrolled, len(answer) - room))
    below = len(answer) - room - watched.scrolled
    shown = [*answer[:1], *answer[1 + watched.scrolled :][: room - 1]]
    if below and len(shown) > 2:
        shown[-1] = Text(f"… {plural(below + 1, 'more line')} (↓)", style="dim")
    return shown[: max(0, room)]


def _wrapped(text: Text, width: int) -> list[Text]:
    from rich.console import Console

    console = Console(width=max(10, width), color_system=None)
    return list(text.wrap(console, max(10, width), overflow="fold", tab_size=4))


def _cut(text: Text, width: int, more: bool = False) -> Text:
    """One line of at most so many cells."""
    text = text.copy()
    if more:
        text.append("…")
        if text.cell_len > width:
            text.right_crop(1)
    text.truncate(width, overflow="ellipsis")
    return text
