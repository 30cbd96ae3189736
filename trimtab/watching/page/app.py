"""The HTTP side: pages, what changes in them, and what is asked for on demand. It only answers GET, and only clients
that call this machine by a name of its own: a page from elsewhere that has its name point here gets nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab.server.http import RequestGate, is_loopback_host
from trimtab.watching.page.boards import Board, IndexBoard, RunBoard
from trimtab.watching.page.document import index_page, run_page
from trimtab.watching.page.script import SCRIPT
from trimtab.watching.page.style import STYLE

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
HEARTBEAT_SECONDS = 15.0
"""After so long without news something is sent all the same, so that a client that is gone is noticed."""


def make_app(folders: Sequence[Path], every: float) -> Starlette:
    """`state.gate` of what is returned ends what clients still listen to."""
    runs = [RunBoard(folder, every) for folder in folders]
    index = IndexBoard(runs, every)
    ending = asyncio.Event()
    serving = secrets.token_hex(4)

    def run_of(request: Request) -> RunBoard:
        number = int(request.path_params["number"])
        if not 1 <= number <= len(runs):
            raise HTTPException(404, f"there is no run {number}")
        return runs[number - 1]

    async def looked(board: Board) -> str:
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

    def events(board: Board, request: Request) -> Response:
        known, _, version = request.headers.get("last-event-id", request.query_params.get("seen", "")).rpartition("-")
        seen = int(version) if known == serving and version.isdecimal() else 0
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(changes(board, seen), media_type="text/event-stream", headers=headers)

    async def changes(board: Board, seen: int) -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        quiet = 0.0
        while not ending.is_set():
            version = await run_in_threadpool(board.look)
            if version > seen:
                changed = await run_in_threadpool(board.since, seen)  # another client may have it drawn just now
                seen, quiet = version, 0.0
                yield f"id: {serving}-{seen}\nevent: sections\ndata: {json.dumps(changed)}\n\n"
            elif quiet >= HEARTBEAT_SECONDS:
                quiet = 0.0
                yield ": still here\n\n"
            quiet += board.every
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), board.every)
        yield "event: end\ndata: {}\n\n"

    async def run_events(request: Request) -> Response:
        return events(run_of(request), request)

    async def index_events(request: Request) -> Response:
        return events(index, request)

    async def style(request: Request) -> Response:
        return Response(STYLE, media_type="text/css")

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
