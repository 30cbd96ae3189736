"""The HTTP side of a reward server: POST in either protocol to / or /get_reward, GET /health and /metrics.

Everything that a client can get wrong is a 4xx with one sentence, in the form its protocol has for errors.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trimtab.rewards.protocols import PROTOCOLS, NotUnderstood, Protocol, protocol_of
from trimtab.rewards.server.batching import Batcher, Overloaded
from trimtab.rewards.server.metrics import Metrics
from trimtab.rewards.types import BadSample, Reward, RewardFailed
from trimtab.web.manners import Closing, Gate
from trimtab.web.requests import Refused, authorise, json_object, read_body

log = logging.getLogger(__name__)


def make_app(
    reward: Reward, *, token: str | None = None, max_bytes: int = 2**26, max_samples: int | None = None
) -> Starlette:
    """`token`: what requests must bring; `max_bytes`: of a request; `max_samples`: of a batch. `state.gate` of what is
    returned lets requests in, and `state.batcher` answers them."""
    metrics, gate = Metrics(), Gate()
    batcher: Batcher | None = None

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal batcher
        batcher = Batcher(reward, metrics, max_samples=max_samples)
        app.state.batcher, gate.give_up = batcher, batcher.give_up
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()
        batcher.close()

    async def score(request: Request) -> Response:
        assert batcher is not None
        response: Response
        protocol = next(known for known in PROTOCOLS.values() if known.path == request.url.path)
        try:
            with gate.entered():
                authorise(request, token)
                body = json_object(await read_body(request, max_bytes, "send fewer samples at once"))
                protocol = protocol_of(body)
                result = await batcher.score(protocol.read_request(body))
                response = JSONResponse(protocol.reply_body(result))
        except ClientDisconnect:
            response = Response(status_code=400)  # which nobody reads
        except Exception as error:
            response = _refusal(error, protocol)
        metrics.requests[response.status_code] += 1
        return response

    async def health(request: Request) -> Response:
        status = {"status": "closing" if gate.closed else "ok"}
        about = {"reward": reward.name, "protocols": list(PROTOCOLS)}
        return JSONResponse(status | about, 503 if gate.closed else 200)

    async def page(request: Request) -> Response:
        try:
            authorise(request, token)
        except Refused as refusal:
            return PlainTextResponse(f"{refusal}\n", refusal.status)
        return PlainTextResponse(metrics.page())

    scoring = [Route(protocol.path, score, methods=["POST"]) for protocol in PROTOCOLS.values()]
    others = [Route("/health", health), Route("/metrics", page)]
    app = Starlette(routes=[*scoring, *others], lifespan=lifespan)
    app.state.gate = gate
    return app


def _refusal(error: Exception, protocol: Protocol) -> Response:
    headers = {}
    match error:
        case Refused():
            status, message = error.status, str(error)
            headers = {"Connection": "close"} if status in (408, 413) else {}
        case NotUnderstood() | BadSample():
            status, message = 422, str(error)
        case Overloaded():
            status, message, headers = 503, "too many samples wait; try again", {"Retry-After": "1"}
        case Closing():
            headers = {"Retry-After": "1", "Connection": "close"}
            status, message = 503, "the server is about to end; ask another one, or try again"
        case RewardFailed():
            log.error("%s", error)
            status, message = 500, str(error)
        case _:
            log.error("a request failed", exc_info=error)
            status, message = 500, "the server failed; its log says why"
    return JSONResponse(protocol.error_body(status, message), status, headers)
