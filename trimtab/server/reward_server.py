"""The reward server: `trimtab serve-rm` scores answers for other processes, with dynamic batching.

    POST / or /get_reward in either protocol (rewards/client), GET /health and /metrics

Samples of requests that arrive while a batch is scored form the next batch; no request waits for a batch to fill up. A
batch that fails is scored again request by request, so that no request fails because of another's samples. A client's
mistake is a 4xx with one sentence, in its protocol's error format.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from trimtab.config.jobs import ServeRMOptions
from trimtab.errors import UserError
from trimtab.rewards.client import PROTOCOLS, Protocol, ProtocolError, protocol_of
from trimtab.rewards.types import BadSample, Reward, RewardFailed, RewardRequest, RewardResult, WeightedReward
from trimtab.rewards.verifiers import make_verifier
from trimtab.sandbox.calls import CallThread

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from trimtab.server.http import (
        SECONDS_TO_SEND,
        HTTPError,
        Overloaded,
        RequestGate,
        ServerClosing,
        ServerMetrics,
        address,
        answer_json,
        as_http_error,
        authenticate,
        bind,
        make_server,
        run_until_signal,
    )
except ImportError as error:
    raise UserError(f"a reward server needs the package {error.name}: pip install 'trimtab[serve]'") from error

log = logging.getLogger(__name__)

MOST_WAITING_SAMPLES = 65_536

Scored = asyncio.Future[RewardResult]


class RewardMetrics(ServerMetrics):
    prefix, labels = "trimtab_reward", ("status",)

    def __init__(self) -> None:
        super().__init__()
        self.samples = self.batches = self.waiting = 0


class Batcher:
    """Scores the samples of requests in batches, in a thread."""

    def __init__(self, reward: Reward, metrics: RewardMetrics, *, max_samples: int | None = None):
        """`max_samples`: of a batch; a larger request is a batch by itself."""
        self.reward, self.metrics, self.max_samples = reward, metrics, max_samples
        self._waiting: deque[tuple[RewardRequest, Scored]] = deque()
        self._arrived = asyncio.Event()
        self._unanswered: set[Scored] = set()
        self.calls = CallThread()

    async def score(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        if self.metrics.waiting + len(request) > MOST_WAITING_SAMPLES and self.metrics.waiting:
            raise Overloaded("too many samples wait; try again")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self.metrics.waiting += len(request)
        self._arrived.set()
        self._unanswered.add(future)
        try:
            return await future
        finally:
            self._unanswered.discard(future)

    async def run(self) -> None:
        """Score arriving requests until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not self._waiting:
                self._arrived.clear()
            for (request, future), outcome in zip(batch, await self._score_all([request for request, _ in batch])):
                self.metrics.waiting -= len(request)
                if future.done():  # its client has disconnected
                    continue
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def give_up(self) -> None:
        """Fail all unfinished requests, because the server is about to end."""
        for future in self._unanswered:
            if not future.done():
                future.set_exception(ServerClosing())

    def _next_batch(self) -> list[tuple[RewardRequest, Scored]]:
        batch: list[tuple[RewardRequest, Scored]] = []
        samples = 0
        while self._waiting:
            size = len(self._waiting[0][0])
            if batch and self.max_samples is not None and samples + size > self.max_samples:
                break
            batch.append(self._waiting.popleft())
            samples += size
        return batch

    async def _score_all(self, requests: list[RewardRequest]) -> list[RewardResult | BaseException]:
        with self.metrics.working():
            whole, error = await self.calls.submit(self.reward, (RewardRequest.joined(requests),))
        self.metrics.batches += 1
        self.metrics.samples += sum(map(len, requests))
        if error is None:
            edges = itertools.accumulate(map(len, requests), initial=0)
            return [whole.take(range(first, last)) for first, last in itertools.pairwise(edges)]
        if len(requests) == 1:
            return [error]
        return [outcome for request in requests for outcome in await self._score_all([request])]


def make_reward_app(
    reward: Reward, *, token: str | None = None, max_bytes: int = 2**26, max_samples: int | None = None
) -> Starlette:
    """The app of the reward server; `app.state.gate` admits requests, and `app.state.batcher` scores them. `token`: the
    bearer token that requests need; `max_bytes`: of a request; `max_samples`: of a batch."""
    metrics, gate = RewardMetrics(), RequestGate()
    batcher: Batcher | None = None

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal batcher
        batcher = Batcher(reward, metrics, max_samples=max_samples)
        app.state.batcher, gate.give_up = batcher, batcher.give_up
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()
        batcher.calls.close()

    async def score(request: Request) -> Response:
        protocol = next(known for known in PROTOCOLS.values() if known.path == request.url.path)

        async def answer(body: dict[str, Any], content: bytes) -> Response:
            nonlocal protocol
            assert batcher is not None
            protocol = protocol_of(body)
            result = await batcher.score(protocol.read_request(body))
            return JSONResponse(protocol.reply_body(result))

        how: dict[str, Any] = {"token": token, "max_bytes": max_bytes, "advice": "send fewer samples at once"}
        response = await answer_json(request, gate, answer, lambda error: _error_response(error, protocol), **how)
        metrics.count(response.status_code)
        return response

    async def health(request: Request) -> Response:
        status = {"status": "closing" if gate.closed else "ok"}
        about = {"reward": reward.name, "protocols": list(PROTOCOLS)}
        return JSONResponse(status | about, 503 if gate.closed else 200)

    async def metrics_page(request: Request) -> Response:
        try:
            authenticate(request, token)
        except HTTPError as error:
            return PlainTextResponse(f"{error}\n", error.status)
        counters = {
            "samples_total": metrics.samples,
            "batches_total": metrics.batches,
            "scoring_seconds_total": f"{metrics.seconds:.6f}",
        }
        return PlainTextResponse(metrics.page(counters, {"waiting_samples": metrics.waiting}))

    scoring = [Route(protocol.path, score, methods=["POST"]) for protocol in PROTOCOLS.values()]
    others = [Route("/health", health), Route("/metrics", metrics_page)]
    app = Starlette(routes=[*scoring, *others], lifespan=lifespan)
    app.state.gate = gate
    return app


def _error_response(error: Exception, protocol: Protocol) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)  # nobody receives it
    if isinstance(error, ProtocolError | BadSample):
        error = HTTPError(422, str(error))
    elif isinstance(error, RewardFailed):
        log.error("%s", error)
        error = HTTPError(500, str(error))
    known = as_http_error(error)
    return JSONResponse(protocol.error_body(known.status, str(known)), known.status, known.headers)


# ---- trimtab serve-rm


def served_reward(options: ServeRMOptions) -> Reward:
    """The reward that options name: reward models, a process reward model, or verifiers."""
    if options.reward_verifier:
        return make_verifier(options.reward_verifier)
    # Verifiers are served without torch.
    from trimtab.distributed.device import find_device
    from trimtab.rewards.models import ModelReward, ProcessReward

    device = find_device()
    limits: dict[str, Any] = {"max_len": options.max_len, "max_samples": options.batch_size}
    assert options.reward_pretrain is not None, "one or the other is given"
    if options.placeholder_token is not None:
        place, separator = options.step_reward, options.step_separator
        return ProcessReward(options.reward_pretrain, options, device, place=place, separator=separator, **limits)
    names = [name.strip() for name in options.reward_pretrain.split(",") if name.strip()]
    normalize = options.normalize_reward
    models = [ModelReward(name, options, device, normalize=normalize, **limits) for name in names]
    return models[0] if len(models) == 1 else WeightedReward([(model, 1.0) for model in models])


def run_reward_server(
    reward: Reward,
    *,
    host: str,
    port: int,
    token: str | None,
    max_bytes: int,
    max_samples: int | None,
    drain_seconds: float,
    say: Callable[[str], None],
) -> bool:
    """Serve until SIGINT or SIGTERM; returns whether scoring has stopped. `say`: prints the line with the URL once it
    listens."""
    listening = bind(host, port)
    app = make_reward_app(reward, token=token, max_bytes=max_bytes, max_samples=max_samples)
    say(f"serving {reward.name} at {address(listening)}")
    run_until_signal(make_server(app, drain_seconds), listening)
    thread = app.state.batcher.calls.thread
    if thread is None:  # nothing was scored
        return True
    thread.join(SECONDS_TO_SEND)
    return not thread.is_alive()
