"""The HTTP side of a policy server: what other projects' clients ask for, at the places where they ask.

Every path is there a second time behind /s/{session}, whose turns are kept together. What a client can get wrong is a
4xx with one sentence, in the form that these clients read.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trimtab.serving.asking import Asking
from trimtab.serving.drawing import Drawing
from trimtab.serving.fields import Fields
from trimtab.serving.metrics import Metrics
from trimtab.serving.policy import ServedPolicy
from trimtab.serving.records import Records
from trimtab.serving.refusals import NotUnderstood, refusal, reply
from trimtab.web.manners import Closing, Gate
from trimtab.web.requests import authorise, bearer_of, json_object, read_body

MOST_BYTES = 2**25
LONGEST_NAME = 512  # of a session

NOT_OFFERED = {
    "/v1/embeddings": "this server answers prompts, and has no embeddings",
    "/v1/responses": "this server has /v1/chat/completions in its place",
    "/v1/load_lora_adapter": "adapters are not loaded by name; serve the model with its adapter merged",
    "/v1/unload_lora_adapter": "adapters are not loaded by name",
    "/update_weights": "weights are not taken over HTTP; in training the server has the trained ones",
    "/init_weight_transfer_engine": "weights are not taken over HTTP; in training the server has the trained ones",
    "/pause": "the server is not paused from outside; during an update of the weights requests wait",
    "/resume": "the server is not paused from outside",
}

Answer = Callable[[Fields, str | None, Request], Awaitable[Response]]
Elsewhere = Callable[[Request, bytes], Awaitable[Response]]


def make_app(
    policy: ServedPolicy,
    drawing: Drawing,
    records: Records,
    metrics: Metrics,
    *,
    token: str | None = None,
    max_bytes: int = MOST_BYTES,
    version: Callable[[], int] = lambda: 0,
    elsewhere: Elsewhere | None = None,
) -> Starlette:
    """`token`: what requests must bring; `version`: of the weights; `elsewhere`: who answers in another process what
    belongs to a session, or asks for what all processes know together. `state.gate` of what is returned lets requests
    in."""
    gate = Gate(give_up=lambda: drawing.close(Closing()))
    asking = Asking(policy, drawing, records)

    def session_of(request: Request, fields: Fields | None) -> str | None:
        named = request.path_params.get("session") or request.headers.get("x-session-id")
        if named is None and fields is not None:
            named = fields.text("session_id")
        if named is None and token is None and not records.private:
            named = bearer_of(request) or None
        if named is not None and len(named) > LONGEST_NAME:
            raise NotUnderstood(f"the session's name has more than {LONGEST_NAME} characters", "session_id")
        return named

    def posted(path: str, answer: Answer, *, in_one_place: bool = False) -> list[Route]:
        """`in_one_place`: where the sessions are, whether one is named or not."""

        async def handle(request: Request) -> Response:
            response: Response
            counted = False
            try:
                with gate.entered():
                    authorise(request, token)
                    content = await read_body(request, max_bytes, "send less at once")
                    fields = Fields(json_object(content), size=len(content))
                    _check_model(fields, policy.name)
                    session = session_of(request, fields)
                    if elsewhere is not None and (in_one_place or session is not None):
                        counted, answering = True, elsewhere(request, content)
                    else:
                        answering = answer(fields, session, request)
                    response = await _unless_gone(request, answering)
            except ClientDisconnect:
                response = Response(status_code=499)  # which nobody reads
            except Exception as error:
                response = refusal(error)
            if not counted:
                metrics.count(path, response.status_code)
            return response

        return [Route(prefix + path, handle, methods=["POST"]) for prefix in ("", "/s/{session}")]

    def got(
        path: str,
        answer: Callable[[Request], Response],
        *,
        for_all: bool = False,
        by_all: Callable[[], bool] = lambda: False,
    ) -> list[Route]:
        """`for_all`: without a token; `by_all`: whether every process can say it."""

        async def handle(request: Request) -> Response:
            try:
                if not for_all:
                    authorise(request, token)
                if elsewhere is None or by_all():
                    return answer(request)
                return await elsewhere(request, b"")
            except Exception as error:
                return refusal(error)

        return [Route(prefix + path, handle, methods=["GET"]) for prefix in ("", "/s/{session}")]

    def models(request: Request) -> Response:
        about = {"id": policy.name, "object": "model", "created": 0, "owned_by": "trimtab", "root": policy.name}
        return JSONResponse({"object": "list", "data": [about | {"parent": None, "max_model_len": policy.most_tokens}]})

    def health(request: Request) -> Response:
        closing = gate.closed or drawing.closed
        status = {"status": "closing" if closing else "ok", "model": policy.name, "version": version()}
        return JSONResponse(status, 503 if closing else 200)

    def page(request: Request) -> Response:
        return PlainTextResponse(metrics.page(waiting=drawing.waiting, sessions=len(records)))

    def trace(request: Request) -> Response:
        session = session_of(request, None)
        record = None if session is None else records.find(session)
        if session is None or record is None:
            raise NotUnderstood("nothing was drawn in this session, or it is long ago", "session", status=404)
        return JSONResponse({"session": session, "model": policy.name, **record.trace()})

    async def open_session(fields: Fields, session: str | None, request: Request) -> Response:
        name = records.issue()
        return JSONResponse({"session": name, "base_url": f"/s/{name}/v1"})

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = NOT_OFFERED.get(request.url.path)
        if words is not None:
            return reply(501, words, code="not_offered")
        return reply(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}", code="not_found")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        drawing.close(Closing())

    routes = [
        *posted("/v1/chat/completions", asking.chat),
        *posted("/v1/chat/completions/tokens", asking.chat_with_tokens),
        *posted("/v1/completions", asking.complete),
        *posted("/inference/v1/generate", asking.generate),
        *posted("/tokenize", asking.tokenize),
        *posted("/detokenize", asking.detokenize),
        *(posted("/sessions", open_session, in_one_place=True) if records.private else []),
        *got("/v1/models", models, by_all=lambda: True),
        *got("/health", health, for_all=True, by_all=lambda: gate.closed),
        *got("/metrics", page),
        *got("/trace", trace),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: refused, 405: refused})
    app.state.gate = gate
    return app


def _check_model(fields: Fields, name: str) -> None:
    asked = fields.text("model")
    if asked is not None and asked != name:
        words = f"the model {asked[:200]!r} is not served here; it is {name!r}"
        raise NotUnderstood(words, "model", "model_not_found", status=404)


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer; what is being drawn for a client that has gone is given up."""
    answering = asyncio.ensure_future(answer)
    leaving: asyncio.Task[Any] = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return await answering
    finally:
        answering.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
