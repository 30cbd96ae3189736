"""What a reward server counts, as a page that Prometheus reads."""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from trimtab.config.jobs import ServeRMOptions
from trimtab.errors import UserError
from trimtab.rewards.client import PROTOCOLS, NotUnderstood, Protocol, protocol_of
from trimtab.rewards.types import BadSample, Reward, RewardFailed, RewardRequest, RewardResult, WeightedReward
from trimtab.rewards.verifiers import make_verifier

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from trimtab.server.http import (
        SECONDS_TO_SEND,
        HTTPError,
        RequestGate,
        ServerClosing,
        address,
        authenticate,
        bind,
        json_object,
        make_server,
        read_body,
        run_until_signal,
    )
except ImportError as error:
    raise UserError(f"a reward server needs the package {error.name}: pip install 'trimtab[serve]'") from error


class RewardMetrics:
    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # by HTTP status
        self.samples = self.batches = self.waiting = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def batch(self, samples: int) -> Iterator[None]:
        """Count a batch and its time."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.batches += 1
            self.samples += samples
            self.seconds += time.monotonic() - began

    def page(self) -> str:
        by_status = sorted(self.requests.items())
        lines = [
            "# TYPE trimtab_reward_requests_total counter",
            *(f'trimtab_reward_requests_total{{status="{status}"}} {count}' for status, count in by_status),
            "# TYPE trimtab_reward_samples_total counter",
            f"trimtab_reward_samples_total {self.samples}",
            "# TYPE trimtab_reward_batches_total counter",
            f"trimtab_reward_batches_total {self.batches}",
            "# TYPE trimtab_reward_scoring_seconds_total counter",
            f"trimtab_reward_scoring_seconds_total {self.seconds:.6f}",
            "# TYPE trimtab_reward_waiting_samples gauge",
            f"trimtab_reward_waiting_samples {self.waiting}",
        ]
        return "\n".join(lines) + "\n"


# ---- Dynamic batching: while one batch is being scored the samples of later requests gather, and a


MOST_WAITING_SAMPLES = 65_536


class Overloaded(Exception):
    """More samples wait than should; the client may try again."""


class Batcher:
    def __init__(self, reward: Reward, metrics: RewardMetrics, *, max_samples: int | None = None):
        """`max_samples`: of a batch; a larger request is a batch by itself."""
        self.reward, self.metrics, self.max_samples = reward, metrics, max_samples
        self._waiting: deque[tuple[RewardRequest, asyncio.Future[RewardResult]]] = deque()
        self._arrived = asyncio.Event()
        self._unanswered: set[asyncio.Future[RewardResult]] = set()
        self._work: queue.SimpleQueue[tuple[RewardRequest, asyncio.Future[RewardResult]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._score_in_thread, name="reward", daemon=True)
        self.thread.start()

    async def score(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        if self.metrics.waiting + len(request) > MOST_WAITING_SAMPLES and self.metrics.waiting:
            raise Overloaded
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
        """Score what arrives, until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not self._waiting:
                self._arrived.clear()
            for (request, future), outcome in zip(batch, await self._score_all([request for request, _ in batch])):
                self.metrics.waiting -= len(request)
                if future.done():  # its client has gone
                    continue
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def give_up(self) -> None:
        """Whoever still waits is told that the server is about to end."""
        for future in self._unanswered:
            if not future.done():
                future.set_exception(ServerClosing())

    def close(self) -> None:
        self._work.put(None)

    def _score_in_thread(self) -> None:
        while (work := self._work.get()) is not None:
            request, future = work
            try:
                self._tell(future, future.set_result, self.reward(request))
            except BaseException as error:
                self._tell(future, future.set_exception, error)

    @staticmethod
    def _tell(future: asyncio.Future[RewardResult], settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the server did not wait for it
            future.get_loop().call_soon_threadsafe(lambda: None if future.done() else settle(outcome))

    def _next_batch(self) -> list[tuple[RewardRequest, asyncio.Future[RewardResult]]]:
        batch: list[tuple[RewardRequest, asyncio.Future[RewardResult]]] = []
        samples = 0
        while self._waiting:
            size = len(self._waiting[0][0])
            if batch and self.max_samples is not None and samples + size > self.max_samples:
                break
            batch.append(self._waiting.popleft())
            samples += size
        return batch

    async def _score_all(self, requests: list[RewardRequest]) -> list[RewardResult | Exception]:
        scored = asyncio.get_running_loop().create_future()
        try:
            with self.metrics.batch(sum(map(len, requests))):
                self._work.put((RewardRequest.joined(requests), scored))
                whole = await scored
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [outcome for request in requests for outcome in await self._score_all([request])]
        return [_part(whole, rows) for rows in _rows(requests)]


def _rows(requests: list[RewardRequest]) -> list[range]:
    """Which rows of the whole belong to each request."""
    edges = itertools.accumulate(map(len, requests), initial=0)
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def _part(result: RewardResult, rows: range) -> RewardResult:
    cut = slice(rows.start, rows.stop)
    logs = {name: values[cut] for name, values in result.logs.items()}
    return RewardResult(result.rewards[cut], result.scores[cut], logs)


# ---- The HTTP side of a reward server: POST in either protocol to / or /get_reward, GET /health an


log = logging.getLogger(__name__)


def make_reward_app(
    reward: Reward, *, token: str | None = None, max_bytes: int = 2**26, max_samples: int | None = None
) -> Starlette:
    """`token`: what requests must bring; `max_bytes`: of a request; `max_samples`: of a batch. `state.gate` of what is
    returned lets requests in, and `state.batcher` answers them."""
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
        batcher.close()

    async def score(request: Request) -> Response:
        assert batcher is not None
        response: Response
        protocol = next(known for known in PROTOCOLS.values() if known.path == request.url.path)
        try:
            with gate.entered():
                authenticate(request, token)
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
            authenticate(request, token)
        except HTTPError as refusal:
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
        case HTTPError():
            status, message = error.status, str(error)
            headers = {"Connection": "close"} if status in (408, 413) else {}
        case NotUnderstood() | BadSample():
            status, message = 422, str(error)
        case Overloaded():
            status, message, headers = 503, "too many samples wait; try again", {"Retry-After": "1"}
        case ServerClosing():
            headers = {"Retry-After": "1", "Connection": "close"}
            status, message = 503, "the server is about to end; ask another one, or try again"
        case RewardFailed():
            log.error("%s", error)
            status, message = 500, str(error)
        case _:
            log.error("a request failed", exc_info=error)
            status, message = 500, "the server failed; its log says why"
    return JSONResponse(protocol.error_body(status, message), status, headers)


# ---- The reward that a server's options name: reward models, a process reward model, or verifiers.


def served_reward(options: ServeRMOptions) -> Reward:
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


# ---- A reward behind HTTP, until the process is told to stop.


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
    """Runs until it is told to stop. `say` gets the line that says where it listens, once it does. Whether nothing is
    being computed any more."""
    listening = bind(host, port)
    app = make_reward_app(reward, token=token, max_bytes=max_bytes, max_samples=max_samples)
    say(f"serving {reward.name} at {address(listening)}")
    run_until_signal(make_server(app, drain_seconds, logs=[__name__]), listening)
    app.state.batcher.thread.join(SECONDS_TO_SEND)
    return not app.state.batcher.thread.is_alive()
