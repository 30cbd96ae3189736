"""The request queue between endpoints and the engine, the engine's thread, and the metrics of both.

Requests that arrive while others are decoded join the running batch. The engine runs in a thread of the server
(`EngineThread`), or in a loop that has an open session anyway (agents in training, a Learner).
"""

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from trimtab.errors import UserError
from trimtab.rollout.engine import MAX_CHUNK_SECONDS, MIN_CHUNK_SIZE, Engine, Session, decode_chunk_size
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.http import Overloaded, ServerMetrics
from trimtab.server.sessions import stream_seed

log = logging.getLogger(__name__)

MOST_WAITING = 1024
# Clients that were answered together often send their next requests together, so the engine waits for them while they
# keep arriving. The next one is expected after about the time to write the responses, which grows with their number.
SECONDS_OF_QUIET, MORE_FOR_EACH, MOST_SECONDS_OF_QUIET, POLL_SECONDS = 0.001, 0.0001, 0.02, 0.0005
QUIETS_TO_GATHER = 3  # longest wait for all of them, in such intervals
STEPS_TO_BEGIN = 2  # decode steps if most requests have just arrived
SHARE_TO_WAIT_FOR = 1 / 16  # of the running requests; the engine does not wait for fewer
LONGEST_PREPARED = 4096  # tokens of a prompt with its answer; longer ones allocate memory when they arrive


class EngineFailed(Exception):
    """The engine failed on a request, not because of its client."""


class PolicyMetrics(ServerMetrics):
    prefix, labels = "trimtab_policy", ("path", "status")

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens = self.sampled_tokens = 0


@dataclass(frozen=True)
class CompletionRequest:
    """A client's request for answers to one prompt."""

    prompt_ids: list[int]
    sampling: SamplingParams
    answers: int = 1
    session: str | None = None
    seed: int | None = None  # None: the server chooses one
    number: int = 0  # of the prompt in its HTTP request
    stream: bool = False  # report tokens as they are drawn


Report = Callable[[int, Trajectory], None]
"""Called with the index of an answer and its new tokens, or, once it has finished, all of it."""


class CompletionBackend(Protocol):
    """The source of completions for endpoints: a queue in this process, or the engine's process (http_workers.py)."""

    @property
    def most_waiting(self) -> int:
        """Limit of unfinished answers; more are refused."""

    @property
    def waiting(self) -> int:
        """Number of unfinished answers."""

    @property
    def closed(self) -> bool: ...

    async def complete(self, request: CompletionRequest, report: Report | None = None) -> list[Trajectory]:
        """`report`: of a streamed request, called in this event loop."""

    def close(self, error: Exception) -> None:
        """Fail all unfinished requests, and all later ones, with this error."""


@dataclass(eq=False)
class QueuedRequest:
    """One answer for the engine to sample."""

    prompt_ids: list[int]
    seed: int
    sampling: SamplingParams
    session: str | None = None
    partial: Trajectory | None = None  # tokens sampled before the engine's session was closed
    report: Callable[[Trajectory], None] | None = None  # if it is streamed; called in the engine's thread
    reported: int = 0  # tokens
    result: "Future[Trajectory]" = field(default_factory=Future)


class RequestQueue:
    """A `CompletionBackend` whose requests wait for an engine of this process."""

    def __init__(self, metrics: PolicyMetrics, most_waiting: int = MOST_WAITING, seed: int = 0):
        """`most_waiting`: limit of unfinished requests; more are refused; `seed`: for requests without one."""
        self.metrics, self.most_waiting, self.seed = metrics, most_waiting, seed
        self._numbers = itertools.count()
        self._arrived = threading.Condition()
        self._new: deque[QueuedRequest] = deque()
        self._retries: deque[QueuedRequest] = deque()  # were running when the engine failed; retried one by one
        self._running: dict[int, QueuedRequest] = {}
        self._held: set[str] = set()  # sessions whose requests wait
        # Recently answered clients: the number that have not sent another request; running requests admitted since;
        # until when the queue waits for all of them and for the next one; and how long it waits for each.
        self._away = 0
        self._returned: set[int] = set()
        self._away_until = self._quiet_until = 0.0
        self._quiet = 0.0
        self._step_seconds = math.inf  # recent time of a decode step, with all overhead
        self._closed: Exception | None = None

    # ---- for endpoints, in any thread

    async def complete(self, request: CompletionRequest, report: Report | None = None) -> list[Trajectory]:
        loop = asyncio.get_running_loop()

        def in_loop(answer: int, piece: Trajectory) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(report, answer, piece)  # type: ignore[arg-type]

        requests = self.put_all(request, None if report is None else in_loop)
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(one.result) for one in requests)))
        finally:
            for one in requests:
                one.result.cancel()

    def put_all(self, request: CompletionRequest, report: Report | None = None) -> list[QueuedRequest]:
        """One queued request for each answer, each with its seed. `report`: called in the engine's thread."""
        if (seed := request.seed) is None:
            seed = stream_seed(self.seed, request.session, next(self._numbers))
        seed = request_seed(seed, request.number) if request.number else seed
        seeds = [seed, *(request_seed(seed, answer) for answer in range(1, request.answers))]
        requests = [QueuedRequest(request.prompt_ids, own, request.sampling, request.session) for own in seeds]
        for answer, one in enumerate(requests):
            one.report = None if report is None else partial(report, answer)
        self.put(*requests)
        return requests

    def put(self, *requests: QueuedRequest) -> None:
        """Queue all of these requests, or none."""
        with self._arrived:
            if self._closed is not None:
                raise self._closed
            if self.waiting + len(requests) > self.most_waiting:
                raise Overloaded("too many requests wait; try again")
            self._new.extend(requests)
            if self._away:
                self._away = max(0, self._away - len(requests))
                self._quiet_until = time.monotonic() + self._quiet
            self._arrived.notify()

    @property
    def waiting(self) -> int:
        """Number of unfinished requests, including running ones."""
        return len(self._new) + len(self._retries) + len(self._running)

    def hold(self, session: str) -> None:
        """Run no request of this session until `release`."""
        with self._arrived:
            self._held.add(session)

    def release(self, session: str) -> None:
        with self._arrived:
            self._held.discard(session)
            self._arrived.notify()

    def cancel(self, sessions: Collection[str]) -> None:
        """Cancel all requests of these sessions."""
        for request in [*self._new, *self._running.values()]:
            if request.session in sessions:
                request.result.cancel()

    def close(self, error: Exception) -> None:
        """Fail all unfinished requests, and all later ones, with this error."""
        with self._arrived:
            self._closed = self._closed or error
            requests = [*self._new, *self._retries, *self._running.values()]
            self._new.clear()
            self._retries.clear()
            self._arrived.notify_all()
        for request in requests:
            _settle(request, error)

    @property
    def closed(self) -> bool:
        return self._closed is not None

    # ---- for the thread that runs the engine

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until there is something to run, or the queue is closed; returns whether there is."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._ready or self.closed, seconds)
            return self._ready and not self.closed

    @property
    def _ready(self) -> bool:
        return bool(self._retries or self._running) or any(new.session not in self._held for new in self._new)

    def step(self, session: Session, steps: int | None = None) -> None:
        """Admit new requests, decode a chunk of at most `steps` tokens, and settle finished requests."""
        before = len(self._running)
        if self._admit_new(session) and len(self._running) > 2 * before:  # more may arrive soon
            steps = STEPS_TO_BEGIN if steps is None else min(steps, STEPS_TO_BEGIN)
        if not session.has_unfinished:
            return
        steps = decode_chunk_size(steps, full=session.full, seconds=self._step_seconds)
        streams = any(request.report is not None for request in self._running.values())
        if streams:  # somebody reads along
            steps = max(1, min(steps, int(MAX_CHUNK_SECONDS / self._step_seconds)))
        began = time.monotonic()
        finished = session.step(steps)
        if streams or steps >= MIN_CHUNK_SIZE:
            self._step_seconds = (time.monotonic() - began) / steps
        self.finish(finished)
        if streams:
            self._report_new(session)
        if not session.has_unfinished:
            session.step(0)  # its cleanup, while no client waits for it

    def gather(self, session: Session) -> None:
        """Wait for the next requests of clients that were answered together, and prefill them as they arrive. Decoding
        them together takes fewer steps than starting them one by one."""
        while self._gathers:
            if self._admit_new(session):
                self.finish(session.step(0), together=False)
            else:
                time.sleep(POLL_SECONDS)

    @property
    def _gathers(self) -> bool:
        """Whether many clients are expected to return, and the running requests have just begun."""
        begun_before = len(self._running) - len(self._returned)
        worth_while = self._away > max(1, len(self._running) * SHARE_TO_WAIT_FOR)
        if self._retries or self.closed or not worth_while or begun_before > self._away * SHARE_TO_WAIT_FOR:
            return False
        if time.monotonic() < min(self._away_until, self._quiet_until):
            return True
        self._away = 0  # they do not return
        return False

    def _admit_new(self, session: Session) -> bool:
        """Add new requests to the engine's session, and abort cancelled ones; returns whether there were new ones."""
        if self._retries:
            requests = [] if self._running else [self._retries.popleft()]
        else:
            with self._arrived:
                requests = [new for new in self._new if new.session not in self._held]
                self._new = deque(new for new in self._new if new.session in self._held)
        for request in requests:
            self._admit(session, request)
        gone = [number for number, request in self._running.items() if request.result.cancelled()]
        if gone:
            session.abort(gone)
        return bool(requests)

    def _admit(self, session: Session, request: QueuedRequest) -> None:
        if request.result.cancelled():
            return
        try:
            # A partial answer has no alternatives and no plain log-probs at its tokens.
            whole = request.sampling.plain_log_probs or request.sampling.top_log_probs
            partials = None if request.partial is None or whole else [request.partial]
            number = session.add(request.prompt_ids, seed=request.seed, sampling=request.sampling, partials=partials)
        except UserError as error:
            _settle(request, error)
        else:
            self._running[number] = request
            self._returned.add(number)

    def finish(self, rollouts: list[Trajectory], *, together: bool = True) -> None:
        """Settle the queue's requests among these finished samples. `together`: their clients may return together."""
        finished = [(request, rollout) for rollout in rollouts if (request := self._running.pop(rollout.prompt, None))]
        self._returned &= self._running.keys()
        if finished and together:
            self._expect_return(len(finished))
        for request, rollout in finished:
            if request.report is not None:  # of all, before the last result ends their stream
                request.report(rollout)
        for request, rollout in finished:
            self.metrics.sampled_tokens += len(rollout.tokens)
            self.metrics.prompt_tokens += len(rollout.prompt_ids)
            _settle(request, rollout)

    def _report_new(self, session: Session) -> None:
        known = {number: own.reported for number, own in self._running.items() if own.report is not None}
        for number, piece in session.new_tokens(known).items():
            request = self._running[number]
            request.reported += len(piece.tokens)
            assert request.report is not None, "it is streamed"
            request.report(piece)

    def _expect_return(self, clients: int) -> None:
        with self._arrived:
            now = time.monotonic()
            if now >= self._away_until:
                self._away = 0
                self._returned.clear()
            self._away += clients
            self._quiet = min(SECONDS_OF_QUIET + MORE_FOR_EACH * self._away, MOST_SECONDS_OF_QUIET)
            self._away_until, self._quiet_until = now + QUIETS_TO_GATHER * self._quiet, now + self._quiet

    def suspend(self, session: Session) -> None:
        """Requeue the running requests of a session that is about to be closed, with their partial answers."""
        partials = session.partials()
        for number, request in self._running.items():
            found = partials.get(number, [])
            request.partial = found[0] if found and len(found[0].tokens) else None
        with self._arrived:
            self._new.extendleft(reversed(self._running.values()))
        self._running.clear()
        self._returned.clear()

    def engine_failed(self, error: Exception) -> None:
        """Handle the loss of the session: a request that ran alone fails; several are retried one by one."""
        requests = list(self._running.values())
        self._running.clear()
        self._returned.clear()
        if len(requests) == 1:
            _settle(requests[0], EngineFailed(str(error)))
        else:
            self._retries.extend(requests)


def _settle(request: QueuedRequest, outcome: Trajectory | Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # its client has disconnected
        if isinstance(outcome, Exception):
            request.result.set_exception(outcome)
        else:
            request.result.set_result(outcome)


class EngineThread:
    """A thread in which an engine runs the requests of a queue."""

    def __init__(self, engine: Engine, queue: RequestQueue, usual: SamplingParams, longest: int):
        """`usual`: the sampling of most requests; `longest`: tokens of a prompt with its answer."""
        self.engine, self.queue, self.usual = engine, queue, usual
        self.longest = min(longest, LONGEST_PREPARED)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.queue.closed:
                # An engine that fails to open a session will fail again, so that ends the thread.
                with self.engine.session(self.usual) as session:
                    session.prepare(self.longest)
                    try:
                        while self.queue.wait():
                            with self.queue.metrics.working():
                                self.queue.gather(session)
                                self.queue.step(session)
                    except Exception as error:
                        log.error("the engine failed", exc_info=error)
                        self.queue.engine_failed(error)
        except Exception as error:
            log.error("the engine cannot go on", exc_info=error)
            self.queue.close(EngineFailed(str(error)))
        finally:
            self.queue.close(EngineFailed("the engine has ended"))
