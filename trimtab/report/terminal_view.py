"""Runs as lines of text for a terminal of any size: state, curves, time, alarms, an answer."""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from rich.text import Text

from trimtab.report.findings import warnings
from trimtab.report.formatting import duration, percent, plain, plural, short_number, sparkline
from trimtab.report.rollouts import answer_facts, best_and_worst, turns_of
from trimtab.report.run_data import (
    RECENT,
    Condition,
    FollowedRun,
    Point,
    Progress,
    RunData,
    State,
    finite,
    progress_of,
    state_of,
)
from trimtab.report.summary import job_name, success_of
from trimtab.report.time_line import phase_times


@dataclass(frozen=True)
class Sparkline:
    name: str
    points: list[Point]
    shown: Callable[[float], str] = short_number

    @property
    def first(self) -> str:
        return self.shown(self.points[0][1])

    @property
    def last(self) -> str:
        return self.shown(self.points[-1][1])

    def drawn(self, width: int) -> str:
        """At most `width` characters; of a longer curve each is the mean of a few steps."""
        values = _means([value for _, value in self.points], width)
        low, high = min(values), max(values)
        flat = high - low <= 1e-9 * max(abs(low), abs(high))
        return "▄" * len(values) if flat else sparkline(values, low, high)


Shown = Callable[[float], str]
RL: dict[str, tuple[str, Shown]] = {
    "kl": ("KL", short_number),
    "teacher_kl": ("KL to teacher", short_number),
    "distance": ("distance", short_number),
    "log_bad_probability": ("log P(bad)", short_number),
    "worst_reward": ("worst reward", short_number),
    "bad_share": ("bad answers", percent),
    "proposal_reward": ("proposal", short_number),
    "sampled_entropy": ("entropy", short_number),
    "entropy": ("entropy", short_number),
    "length": ("length", short_number),
    "turns": ("turns", short_number),
    "age": ("age", short_number),
    "critic_loss": ("critic loss", short_number),
    "grad_norm": ("gradient", short_number),
}
FIXED: dict[str, tuple[str, Shown]] = {
    "loss": ("loss", short_number),
    "eval_loss": ("eval loss", short_number),
    "accuracy": ("accuracy", percent),
    "eval_accuracy": ("eval accuracy", percent),
    "reward_margin": ("margin", short_number),
    "eval_reward_margin": ("eval margin", short_number),
    "nll": ("NLL", short_number),
    "distance": ("distance", short_number),
    "kl": ("KL", short_number),
    "learning_rate": ("learning rate", short_number),
    "grad_norm": ("gradient", short_number),
}


def curves_of(run: RunData) -> list[Sparkline]:
    """The most telling first: a small terminal shows no others."""
    found = []
    if run.is_rl:
        if reward := run.series("reward"):
            found.append(Sparkline("reward", reward))
        if success := success_of(run):
            found.append(Sparkline("evaluation", success.points, success.shown))
    for name, (words, shown) in (RL if run.is_rl else FIXED).items():
        points = run.series(name)
        if points and words not in {curve.name for curve in found}:
            found.append(Sparkline(words, points, shown))
    return found


def _means(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of equally many of the given ones but the first, which may have fewer."""
    size = math.ceil(len(values) / max(1, width))
    starts = range(len(values) - size, -size, -size)
    return [fmean(values[max(0, start) : start + size]) for start in reversed(starts)]


# ---- The best and worst answers of an iteration, and which of them is shown.


@dataclass(frozen=True)
class Answer:
    kind: str
    """best or worst."""
    number: int
    """Among those of its kind, from 1."""
    of: int
    step: int
    row: dict[str, Any]


class Shelf:
    """The answers of a run, one of which is shown: the newest, unless the user went back."""

    def __init__(self) -> None:
        self.step: int | None = None
        """Whose answers are shown; None: the newest iteration's, whichever that is."""
        self.place = 0
        self._steps: list[int] = []
        self._rows: list[dict[str, Any]] = []

    def fill(self, run: RunData) -> None:
        # Those of the iteration that is about to have its row may not be written all.
        done = run.rows[-1]["step"] if run.rows else 0
        self._rows = [row for row in run.rollouts if row["step"] <= done and row.get("kept") in ("best", "worst")]
        self._steps = sorted({row["step"] for row in self._rows})
        if self.step not in self._steps:
            self.step = None

    def shown(self) -> Answer | None:
        answers = self._answers()
        if not answers:
            return None
        self.place = max(0, min(self.place, len(answers) - 1))
        return answers[self.place]

    def other(self) -> Answer | None:
        """To compare with: the very worst of the iteration beside one of the best, and the other way round."""
        shown = self.shown()
        return next((answer for answer in self._answers() if shown and answer.kind != shown.kind), None)

    def turn(self, by: int) -> None:
        """To the next answer of this iteration, or the one before; round and round."""
        if answers := self._answers():
            self.place = (self.place + by) % len(answers)

    def jump(self, kind: str) -> None:
        """To the very best or the very worst."""
        self.place = next((place for place, answer in enumerate(self._answers()) if answer.kind == kind), self.place)

    def go(self, by: int) -> None:
        """To an earlier or later iteration; past the last one, to whatever is the newest."""
        if not self._steps:
            return
        here = len(self._steps) - 1 if self.step is None else self._steps.index(self.step)
        there = max(0, here + by)
        self.step = self._steps[there] if there < len(self._steps) - 1 else None

    def _answers(self) -> list[Answer]:
        if not self._steps:
            return []
        step = self._steps[-1] if self.step is None else self.step
        kinds = best_and_worst([row for row in self._rows if row["step"] == step])
        return [
            Answer(kind, number, len(rows), step, row)
            for kind, rows in zip(("best", "worst"), kinds)
            for number, row in enumerate(rows, start=1)
        ]


def harmless(text: Any) -> str:
    """What a model or a file said, without what would steer a terminal."""
    return "".join(map(_harmless, plain(text).replace("\t", "    ")))


def _harmless(letter: str) -> str:
    kind = unicodedata.category(letter)
    if letter in "\n\N{ZERO WIDTH JOINER}" or kind not in ("Cc", "Cf", "Cs", "Co"):
        return letter
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))  # the picture of a control character
    return "" if kind == "Cf" else "\N{REPLACEMENT CHARACTER}"


# ---- One run.


COLOURS = {
    Condition.AWAITED: "dim",
    Condition.STARTING: "cyan",
    Condition.RUNNING: "green",
    Condition.SILENT: "yellow",
    Condition.STOPPED: "red",
    Condition.FINISHED: "blue",
}
PHASE_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
NAME_CELLS = 14
"""Width of the names of curves."""
FEWEST_ANSWER_LINES = 6


@dataclass
class Watched:
    """A run, what was made of its files, and where in it a person is."""

    followed: FollowedRun
    shelf: Shelf = field(default_factory=Shelf)
    scrolled: int = 0
    """Lines of the answer that are above the window."""
    curves: list[Sparkline] = field(default_factory=list)
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


def _curve(curve: Sparkline, width: int) -> Text:
    figures = f" {curve.last}"
    before = f"  from {curve.first}" if len(curve.points) > 1 else ""
    room = max(4, min(60, width - NAME_CELLS - 24))
    line = Text(f"{curve.name:<{NAME_CELLS - 1}.{NAME_CELLS - 1}} ")
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
        line = Text(f"{'time':<{NAME_CELLS}}")
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
    for words_of_line in _filled([text for text in told if text], width - NAME_CELLS):
        lines.append(_cut(Text(" " * NAME_CELLS + words_of_line), width))
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
    reward, facts = answer_facts(answer.row)
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
    """One line of at most `width` cells."""
    text = text.copy()
    if more:
        text.append("…")
        if text.cell_len > width:
            text.right_crop(1)
    text.truncate(width, overflow="ellipsis")
    return text


# ---- Several runs.


RUN_NAME_CELLS = 24


def overview(runs: Sequence[Watched], width: int, height: int | None) -> list[Text]:
    """Two lines a run if there is room, else one."""
    both = height is None or 2 * len(runs) <= height
    lines = []
    for number, watched in enumerate(runs, start=1):
        lines.append(_doing(watched, number, width))
        if both:
            lines.append(_figures(watched, width))
    if height is not None and len(lines) > height:
        more = Text(f"… and {len(lines) - height + 1} more", style="dim")
        more.truncate(width)
        lines = [*lines[: height - 1], more]
    return lines


def _doing(watched: Watched, number: int, width: int) -> Text:
    state, progress = watched.state, watched.progress
    name = watched.name if len(watched.name) <= RUN_NAME_CELLS else "…" + watched.name[1 - RUN_NAME_CELLS :]
    line = Text(f"{number:>2} ").append(f"{name:<{RUN_NAME_CELLS}} ", style="bold")
    line.append(f"● {state.in_words}", style=COLOURS[state.condition])
    if progress.share is not None:
        line.append(f"  {watched.followed.run.unit} {progress.done:,} of {progress.planned:,}, ")
        line.append(percent(progress.share, 0))
    if progress.remaining and state.condition is Condition.RUNNING:
        line.append(f"  {duration(progress.remaining)} to go", style="dim")
    if watched.alarms:
        line.append(f"  ! {len(watched.alarms)}", style="bold red" if watched.alarms[0][0] else "yellow")
    line.truncate(width, overflow="ellipsis")
    return line


def _figures(watched: Watched, width: int) -> Text:
    line = Text("   ")
    room = max(8, (width - 3) // 2 - 26)
    for curve in watched.curves[:2]:
        line.append(f"{curve.name[:13]:<13} ").append(f"{curve.drawn(room):<{room}}", style="cyan")
        line.append(f" {curve.last:<9}", style="bold")
    line.truncate(width, overflow="ellipsis")
    return line
