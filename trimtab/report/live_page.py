"""The live page: a run's sections served on the loopback address, sent again when they change.

The server only answers GET, and only requests whose Host names this machine: a page of another site whose name
resolves to this address gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab import __version__
from trimtab.errors import UserError
from trimtab.report.assets import LIVE_STYLE, SCRIPT
from trimtab.report.findings import warnings
from trimtab.report.formatting import duration, short_name, short_number
from trimtab.report.page import SECTIONS, document, finding_list, key_figures
from trimtab.report.rollouts import answers
from trimtab.report.run_data import Condition, FollowedLines, FollowedRun, finite, progress_of, state_of
from trimtab.report.summary import job_name, lead, subject
from trimtab.server.http import RequestGate, address, bind, is_loopback_host, make_server, run_until_signal

TOKENS = "tokens.jsonl"
BEGINNING = re.compile(rb'\{"step": (\d{1,15}), "answer": (\d{1,15}), ')
SURE = (-0.105, -0.51, -1.2, -2.3, -4.6)
"""Log-probs of 90, 60, 30, 10 and 1 percent: below each the colour is one stronger."""
STRENGTHS = (0.1, 0.4, 0.7)
"""Shares of an iteration's largest advantage, likewise."""


class TokenFile:
    """tokens.jsonl of a run, for several threads: the place of each answer in it."""

    def __init__(self, folder: Path):
        self._file = FollowedLines(folder / TOKENS)
        self._lock = threading.Lock()
        self._places: dict[tuple[int, int], int] = {}
        self._scales: dict[int, float] = {}

    def answer(self, step: int, number: int) -> str:
        """The tokens of an answer as HTML; empty where they are not kept."""
        with self._lock:
            void, lines = self._file.new_lines()
            if void:
                self._places.clear()
            for place, line in lines:
                if found := BEGINNING.match(line):
                    self._places[int(found[1]), int(found[2])] = place
                self._scales.clear()
            if (row := self._read(step, number)) is None:
                return ""
            if step not in self._scales:
                rows = [self._read(*key) for key in self._places if key[0] == step]
                sizes = [abs(value) for one in rows if one for value, _ in _runs(one.get("advantages"))]
                self._scales = {step: max(sizes, default=0.0)}
            return tokens(row, self._scales[step])

    def _read(self, step: int, number: int) -> dict[str, Any] | None:
        if (place := self._places.get((step, number))) is None:
            return None
        try:
            with self._file.path.open("rb") as file:
                file.seek(place)
                row = json.loads(file.readline())
        except (OSError, ValueError, RecursionError):
            return None
        return row if isinstance(row, dict) and (row.get("step"), row.get("answer")) == (step, number) else None


def tokens(row: dict[str, Any], scale: float) -> str:
    """An answer's tokens as spans, stretch by stretch; `scale`: the largest advantage."""
    texts = row.get("texts")
    texts = [str(text) for text in texts] if isinstance(texts, list) else []
    log_probs = iter(row["log_probs"] if isinstance(row.get("log_probs"), list) else ())
    advantages = (value for value, count in _runs(row.get("advantages")) for _ in range(count))
    gap, left_out = _gap(row.get("left_out"))
    body, place = "", 0
    for drawn, length in _stretches(row.get("drawn"), len(texts)):
        spans = ""
        for number in range(place, place + length):
            if number == gap:
                spans += f"<span class=gap> … {left_out:,} tokens are not kept … </span>"
            if drawn:
                spans += _drawn(texts[number], finite(next(log_probs, None)), next(advantages, None), scale)
            else:
                spans += f"<span class=world>{_shown(texts[number])}</span>"
        body += f'<li class="{"drawn" if drawn else "world"}"><pre>{spans}</pre></li>'
        place += length
    return f"<ol class=turns>{body}</ol>" if body else "<p class=nothing>No token was drawn.</p>"


def _drawn(text: str, log_prob: float | None, advantage: float | None, scale: float) -> str:
    classes, facts = ["drawn"], []
    if log_prob is not None:
        classes.append(f"p{sum(log_prob < edge for edge in SURE)}")
        facts.append(f"{log_prob:.3f}")
    if advantage is not None:
        if scale and (strength := sum(abs(advantage) >= share * scale for share in STRENGTHS)):
            classes.append(f"{'a' if advantage > 0 else 'b'}{strength}")
        facts.append(short_number(advantage))
    return f'<span class="{" ".join(classes)}" data-facts="{escape(" ".join(facts))}">{_shown(text)}</span>'


def _shown(text: str) -> str:
    """A line's end is a character that can be seen, and pointed at, too."""
    return escape(text).replace("\n", "<i>↵</i>\n")


def _stretches(listed: Any, whole: int) -> Iterator[tuple[bool, int]]:
    """By turns of the model and of the world, as far as there are tokens."""
    drawn = True
    for length in listed if isinstance(listed, list) else ():
        length = min(max(int(finite(length) or 0), 0), whole)
        if length:
            yield drawn, length
        whole -= length
        drawn = not drawn


def _runs(listed: Any) -> Iterator[tuple[float, int]]:
    for pair in listed if isinstance(listed, list) else ():
        value, count = map(finite, pair) if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if count is not None:
            yield value or 0.0, int(count)


def _gap(listed: Any) -> tuple[int, int]:
    numbers = [finite(value) for value in listed] if isinstance(listed, list) else []
    place, count = numbers if len(numbers) == 2 else (None, None)
    return (-1, 0) if place is None or count is None else (int(place), int(count))


# ---- Sections by name, rendered anew when the run's files have changed.


LIVE_SECTIONS = {
    **{name: section for name, section in SECTIONS.items() if name not in ("head", "browser")},
    "findings": lambda run: finding_list([*warnings(run), *run.problems]),  # the head says how far the run is
    "answers": answers,
}
"""The report's sections, but for the answers: of these the live page shows any iteration's."""


@dataclass
class LiveSections:
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


class LiveRun(LiveSections):
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
            drawn |= {name: section(run) if run.rows else "" for name, section in LIVE_SECTIONS.items()}
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
            figures = key_figures(followed.run) if followed.run.rows else ""
            return (
                f"<li class=card data-key={number}><h2><a href='/run/{number}'>{escape(self.name)}</a></h2>"
                f"<p class=words>{escape(told)}</p>{pill(followed)}{figures}</li>"
            )


class LiveIndex(LiveSections):
    """Several runs."""

    def __init__(self, runs: Sequence[LiveRun], every: float):
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


# ---- The HTML document around the sections.


COLOURS = {"text": "nothing", "log-prob": "log-prob", "advantage": "advantage", "mask": "mask"}
JUMPS = {"curves": "curves", "answers": "answers", "time": "time", "pace": "speed", "configuration": "options"}
LEGENDS = {
    "log-prob": [("p0", "≥ 90 %"), ("p1", "≥ 60"), ("p2", "≥ 30"), ("p3", "≥ 10"), ("p4", "≥ 1"), ("p5", "&lt; 1 %")],
    "advantage": [("b3", "made rarer"), ("b2", ""), ("b1", ""), ("", "0"), ("a1", ""), ("a2", ""), ("a3", "likelier")],
    "mask": [("drawn", "drawn by the model, carries loss"), ("world", "read only")],
}


def live_document(title: str, board: LiveSections, seen: str, *, under: str = "", home: bool = False) -> str:
    """The page as it is now, which is the version `seen`; `under`: the URL of its requests; `home`: with a link to the
    list of runs."""
    body = ""
    for name, html in board.since(0).items():
        section = f'<section id="{name}">{html}</section>\n'
        body += f"<div>{controls()}{section}</div>" if name == "answers" else section
    links = {"/": "all runs"} if home else {}
    links |= {f"#{name}": words for name, words in JUMPS.items() if name in board.sections}
    listed = "".join(f"<a href='{place}'>{words}</a>" for place, words in links.items())
    return document(
        title,
        (f"<nav>{listed}</nav>" if listed else "")
        + body
        + "<noscript><p class=words>Without its script this page is as it was when it was loaded.</p></noscript>"
        "<p id=lost hidden>The page's server has ended; what is shown stays as it was.</p><p id=pointed hidden></p>",
        f"trimtab {__version__}; read from the run's folder, on this machine.",
        head="<link rel=icon href='data:,'>\n<link rel=stylesheet href='/page.css'>\n"
        "<script src='/page.js' defer></script>",
        attributes=f' data-under="{escape(under)}" data-seen="{escape(seen)}"',
    )


def run_page(board: LiveRun, seen: str, number: int, several: bool) -> str:
    return live_document(board.name, board, seen, under=f"/run/{number}", home=several)


def index_page(board: LiveIndex, seen: str) -> str:
    return live_document(f"{len(board.runs)} runs", board, seen)


def controls() -> str:
    """Which iteration's answers are shown, and what colours their tokens."""
    radios = "".join(
        f'<label><input type=radio name=colour value="{value}"{" checked" if value == "text" else ""}>'
        f"<span>{words}</span></label>"
        for value, words in COLOURS.items()
    )
    legends = ""
    for name, keys in LEGENDS.items():
        spans = "".join(f'<span class="{kind}">{words}</span>' for kind, words in keys)
        legends += f'<p class="legend {name}">{spans}</p>'
    return (
        "<div id=controls hidden><div class=steps role=group aria-label='which iteration'>"
        "<button type=button data-go=earlier>‹ earlier</button>"
        "<input type=number inputmode=numeric aria-label=iteration>"
        "<button type=button data-go=later>later ›</button><button type=button data-go=newest>newest</button></div>"
        f"<fieldset class=colours><legend>colour tokens by</legend>{radios}</fieldset>{legends}</div>"
    )


# ---- The HTTP server.


HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LONGEST_PATH = 100
"""Characters; no number in a path of this server's is longer."""


def make_app(folders: Sequence[Path], every: float) -> Starlette:
    """`state.gate` of what is returned ends what clients still listen to."""
    runs = [LiveRun(folder, every) for folder in folders]
    index = LiveIndex(runs, every)
    ending = asyncio.Event()
    serving = secrets.token_hex(4)

    def run_of(request: Request) -> LiveRun:
        number = int(request.path_params["number"])
        if not 1 <= number <= len(runs):
            raise HTTPException(404, f"there is no run {number}")
        return runs[number - 1]

    async def looked(board: LiveSections) -> str:
        """The version, in words that another server's will not be taken for."""
        return f"{serving}-{await run_in_threadpool(board.look)}"

    async def home(request: Request) -> Response:
        if len(runs) == 1:
            return RedirectResponse("/run/1")
        return HTMLResponse(await run_in_threadpool(index_page, index, await looked(index)))

    async def run(request: Request) -> Response:
        board = run_of(request)
        number = request.path_params["number"]
        return HTMLResponse(await run_in_threadpool(run_page, board, await looked(board), number, len(runs) > 1))

    async def answers(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(run_of(request).answers, request.path_params["step"]))

    async def answer_tokens(request: Request) -> Response:
        step, answer = request.path_params["step"], request.path_params["answer"]
        html = await run_in_threadpool(run_of(request).tokens.answer, step, answer)
        return HTMLResponse(html, 200 if html else 404)

    def events(board: LiveSections, request: Request) -> Response:
        known, _, version = request.headers.get("last-event-id", request.query_params.get("seen", "")).rpartition("-")
        seen = int(version) if known == serving and version.isdecimal() else 0
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(changes(board, seen), media_type="text/event-stream", headers=headers)

    async def changes(board: LiveSections, seen: int) -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        while not ending.is_set():
            version = await run_in_threadpool(board.look)
            if version > seen:
                changed = await run_in_threadpool(board.since, seen)  # another client may have it drawn just now
                seen = version
                yield f"id: {serving}-{seen}\nevent: sections\ndata: {json.dumps(changed)}\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), board.every)
        yield "event: end\ndata: {}\n\n"

    async def run_events(request: Request) -> Response:
        return events(run_of(request), request)

    async def index_events(request: Request) -> Response:
        return events(index, request)

    async def style(request: Request) -> Response:
        return Response(LIVE_STYLE, media_type="text/css")

    async def script(request: Request) -> Response:
        return Response(SCRIPT, media_type="text/javascript")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return PlainTextResponse(f"{error.detail}\n", error.status_code)

    routes = {
        "/": home,
        "/events": index_events,
        "/run/{number:int}": run,
        "/run/{number:int}/events": run_events,
        "/run/{number:int}/answers/{step:int}": answers,
        "/run/{number:int}/tokens/{step:int}/{answer:int}": answer_tokens,
        "/page.css": style,
        "/page.js": script,
    }
    app = Starlette(
        routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()],
        exception_handlers={HTTPException: refused},
    )
    app.state.gate = RequestGate(give_up=ending.set)
    app.add_middleware(Guard)
    return app


class Guard:
    """Who is answered at all, and the headers of every answer."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        refusal = refusal_of(Request(scope))
        await (refusal or self.app)(scope, receive, guarded)


def refusal_of(request: Request) -> Response | None:
    if not is_loopback_host(request.headers.get("host", "")):
        return PlainTextResponse("this page is for this machine: call it by 127.0.0.1 or localhost\n", 421)
    # Another site may lead a person here, and not look in by itself.
    own = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    if not own and request.headers.get("sec-fetch-mode") != "navigate":
        return PlainTextResponse("this page is not for other sites\n", 403)
    if len(request.url.path) > LONGEST_PATH:
        return PlainTextResponse("there is no such page\n", 404)
    if request.method != "GET":
        return PlainTextResponse("only GET is answered\n", 405, {"allow": "GET"})
    return None


# ---- Start it.


DRAIN_SECONDS = 2.0


def serve_page(folders: Sequence[Path], *, port: int, every: float) -> None:
    """Serve until Ctrl-C. `port`: 0 for a free one; `every`: seconds between two looks at the files."""
    try:
        listening = bind("127.0.0.1", port)
    except UserError as error:
        raise UserError(f"--port {port}: somebody listens there, or you may not; choose another, or 0") from error
    server = make_server(make_app(folders, every), DRAIN_SECONDS)
    what = str(folders[0]) if len(folders) == 1 else f"{len(folders)} runs"
    print(f"{what} at {address(listening)} (Ctrl-C ends it)", flush=True)
    run_until_signal(server, listening)
