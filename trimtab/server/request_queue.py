"""What a policy server counts, as a page that Prometheus reads."""

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Protocol

from trimtab.errors import UserError
from trimtab.rollout.engine import MIN_CHUNK_SIZE, Engine, Session, decode_chunk_size
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Draft, Rollout
from trimtab.server.sessions import stream_seed


class PolicyMetrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and HTTP status
        self.read = self.drawn = 0  # tokens of prompts and of answers
        self.seconds = 0.0  # in which the engine worked

    def count(self, path: str, status: int) -> None:
        self.requests[path, status] += 1

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def page(self, *, waiting: int, sessions: int) -> str:
        lines = ["# TYPE trimtab_policy_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'trimtab_policy_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, kind, value in (
            ("prompt_tokens_total", "counter", self.read),
            ("drawn_tokens_total", "counter", self.drawn),
            ("engine_seconds_total", "counter", f"{self.seconds:.6f}"),
            ("waiting_requests", "gauge", waiting),
            ("sessions", "gauge", sessions),
        ):
            lines += [f"# TYPE trimtab_policy_{name} {kind}", f"trimtab_policy_{name} {value}"]
        return "\n".join(lines) + "\n"


# ---- Where requests wait for an engine: asked for from any thread, drawn by the one that works. Re


log = logging.getLogger(__name__)

MOST_WAITING = 1024
# Those that were answered together often ask again together: their next requests are waited for while they keep coming.
# The next one is due after about as long as it takes to write the replies, which is more where they are many.
SECONDS_OF_QUIET, MORE_FOR_EACH, MOST_SECONDS_OF_QUIET, LOOK_EVERY = 0.001, 0.0001, 0.02, 0.0005
QUIETS_TO_GATHER = 3  # altogether
STEPS_TO_BEGIN = 2  # where most have just come
SHARE_TO_WAIT_FOR = 1 / 16  # of those at work; for fewer nobody waits
LONGEST_PREPARED = 4096  # tokens of a prompt with its answer; what is longer finds memory when it comes


class Overloaded(Exception):
    """More requests wait than should; the client may try again."""


class EngineFailed(Exception):
    """A request that the engine cannot answer, through no fault of its client."""


@dataclass(eq=False)
class QueuedRequest:
    """A turn that is to be drawn."""

    prompt_ids: list[int]
    seed: int
    sampling: SamplingParams
    session: str | None = None
    draft: Draft | None = None  # what was drawn of it before it was set down
    answer: "Future[Rollout]" = field(default_factory=Future)


class RequestQueue:
    def __init__(self, metrics: PolicyMetrics, most_waiting: int = MOST_WAITING):
        """`most_waiting`: requests at once; whoever asks beyond them is turned away."""
        self.metrics, self.most_waiting = metrics, most_waiting
        self._arrived = threading.Condition()
        self._new: deque[QueuedRequest] = deque()
        self._suspects: deque[QueuedRequest] = deque()  # at work when the engine failed: they are drawn one by one
        self._at_work: dict[int, QueuedRequest] = {}
        self._held: set[str] = set()  # sessions whose requests wait
        self._away = 0  # of those that were answered of late, who have not asked again;
        self._returned: set[int] = set()  # what has been admitted since then, and
        self._away_until = self._quiet_until = 0.0  # how long they are waited for: altogether, and for the next one,
        self._quiet = 0.0  # seconds
        self._step_seconds = math.inf  # of late, with all that was done beside it
        self._closed: Exception | None = None

    def ask(self, *asks: QueuedRequest) -> None:
        """All of them, or none."""
        with self._arrived:
            if self._closed is not None:
                raise self._closed
            if self.waiting + len(asks) > self.most_waiting:
                raise Overloaded
            self._new.extend(asks)
            if self._away:
                self._away = max(0, self._away - len(asks))
                self._quiet_until = time.monotonic() + self._quiet
            self._arrived.notify()

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return len(self._new) + len(self._suspects) + len(self._at_work)

    def wait(self, seconds: float | None = None) -> bool:
        """Until there is something to do, or the desk is closed; whether there is."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._ready or self.closed, seconds)
            return self._ready and not self.closed

    @property
    def _ready(self) -> bool:
        return bool(self._suspects or self._at_work) or any(ask.session not in self._held for ask in self._new)

    def hold(self, session: str) -> None:
        """What is asked in it is not drawn until it is let go."""
        with self._arrived:
            self._held.add(session)

    def let_go(self, session: str) -> None:
        with self._arrived:
            self._held.discard(session)
            self._arrived.notify()

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def work(self, session: Session, steps: int | None = None) -> None:
        """Let new requests in, draw for a moment or at most so many tokens, and hand over what has finished."""
        before = len(self._at_work)
        if self._let_in(session) and len(self._at_work) > 2 * before:  # more may be on their way
            steps = STEPS_TO_BEGIN if steps is None else min(steps, STEPS_TO_BEGIN)
        if not session.busy:
            return
        steps = decode_chunk_size(steps, full=session.full, seconds=self._step_seconds)
        began = time.monotonic()
        finished = session.advance(steps)
        if steps >= MIN_CHUNK_SIZE:
            self._step_seconds = (time.monotonic() - began) / steps
        self.take(finished)
        if not session.busy:
            session.advance(0)  # it tidies up: nobody waits for that now

    def gather(self, session: Session) -> None:
        """While those that were answered together come back: read what they ask, and draw when they are there. What
        begins together ends together, in fewer steps than what begins bit by bit."""
        while self._gathers:
            if self._let_in(session):
                self.take(session.advance(0), together=False)
            else:
                time.sleep(LOOK_EVERY)

    @property
    def _gathers(self) -> bool:
        """Whether many are away, and what would be drawn meanwhile has only just begun."""
        begun_before = len(self._at_work) - len(self._returned)
        worth_while = self._away > max(1, len(self._at_work) * SHARE_TO_WAIT_FOR)
        if self._suspects or self.closed or not worth_while or begun_before > self._away * SHARE_TO_WAIT_FOR:
            return False
        if time.monotonic() < min(self._away_until, self._quiet_until):
            return True
        self._away = 0  # they have gone elsewhere
        return False

    def _let_in(self, session: Session) -> bool:
        """Whether there was anybody."""
        asks = self._next()
        for ask in asks:
            self._admit(session, ask)
        gone = [number for number, ask in self._at_work.items() if ask.answer.cancelled()]
        if gone:
            session.abort(gone)
        return bool(asks)

    def take(self, rollouts: list[Rollout], *, together: bool = True) -> None:
        """Answers to those of a session's requests that are the desk's; `together`: they may ask again together."""
        answered = [(ask, rollout) for rollout in rollouts if (ask := self._at_work.pop(rollout.prompt, None))]
        self._returned &= self._at_work.keys()
        if answered and together:
            self._missed(len(answered))
        for ask, rollout in answered:
            self.metrics.drawn += len(rollout.tokens)
            self.metrics.read += len(rollout.prompt_ids)
            _settle(ask, rollout)

    def _missed(self, answered: int) -> None:
        """So many are about to be answered, and may ask again."""
        with self._arrived:
            now = time.monotonic()
            if now >= self._away_until:
                self._away = 0
                self._returned.clear()
            self._away += answered
            self._quiet = min(SECONDS_OF_QUIET + MORE_FOR_EACH * self._away, MOST_SECONDS_OF_QUIET)
            self._away_until, self._quiet_until = now + QUIETS_TO_GATHER * self._quiet, now + self._quiet

    def set_down(self, session: Session) -> None:
        """The session is about to be closed. What it has drawn is where the next one goes on."""
        drafts = session.drafts()
        for number, ask in self._at_work.items():
            found = drafts.get(number, [])
            ask.draft = found[0] if found and len(found[0].tokens) else None
        with self._arrived:
            self._new.extendleft(reversed(self._at_work.values()))
        self._at_work.clear()
        self._returned.clear()

    def give_up(self, sessions: Collection[str]) -> None:
        """Those that wait in these sessions are asked for by nobody any more."""
        for ask in [*self._new, *self._at_work.values()]:
            if ask.session in sessions:
                ask.answer.cancel()

    def failed(self, error: Exception) -> None:
        """The session is no more. Whoever was alone in it has its answer; several are tried again one by one."""
        asks = list(self._at_work.values())
        self._at_work.clear()
        self._returned.clear()
        if len(asks) == 1:
            _settle(asks[0], EngineFailed(str(error)))
        else:
            self._suspects.extend(asks)

    def close(self, error: Exception) -> None:
        """Whoever still waits gets this, and whoever comes later."""
        with self._arrived:
            self._closed = self._closed or error
            asks = [*self._new, *self._suspects, *self._at_work.values()]
            self._new.clear()
            self._suspects.clear()
            self._arrived.notify_all()
        for ask in asks:
            _settle(ask, error)

    def _next(self) -> list[QueuedRequest]:
        if self._suspects:
            return [] if self._at_work else [self._suspects.popleft()]
        with self._arrived:
            asks = [ask for ask in self._new if ask.session not in self._held]
            self._new = deque(ask for ask in self._new if ask.session in self._held)
        return asks

    def _admit(self, session: Session, ask: QueuedRequest) -> None:
        if ask.answer.cancelled():
            return
        try:
            # Of a draft nobody knows what else could have been said at its places.
            whole = ask.sampling.plain_log_probs or ask.sampling.top_log_probs
            drafts = None if ask.draft is None or whole else [ask.draft]
            number = session.add(ask.prompt_ids, seed=ask.seed, sampling=ask.sampling, drafts=drafts)
        except UserError as error:
            _settle(ask, error)
        else:
            self._at_work[number] = ask
            self._returned.add(number)


class EngineThread:
    """A thread in which an engine works for a desk."""

    def __init__(self, engine: Engine, desk: RequestQueue, usual: SamplingParams, longest: int):
        """`usual`: how most requests are drawn; `longest`: tokens of a prompt with its answer."""
        self.engine, self.desk, self.usual = engine, desk, usual
        self.longest = min(longest, LONGEST_PREPARED)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.desk.closed:
                # Who cannot begin will not be able to later.
                with self.engine.session(self.usual) as session:
                    session.prepare(self.longest)
                    try:
                        while self.desk.wait():
                            with self.desk.metrics.working():
                                self.desk.gather(session)
                                self.desk.work(session)
                    except Exception as error:
                        log.error("the engine failed", exc_info=error)
                        self.desk.failed(error)
        except Exception as error:
            log.error("the engine cannot go on", exc_info=error)
            self.desk.close(EngineFailed(str(error)))
        finally:
            self.desk.close(EngineFailed("the engine has ended"))


def _settle(ask: QueuedRequest, outcome: Rollout | Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # its client has gone
        if isinstance(outcome, Exception):
            ask.answer.set_exception(outcome)
        else:
            ask.answer.set_result(outcome)


# ---- How endpoints have turns drawn: at a desk of this process, or of another one (front.py).


@dataclass(frozen=True)
class CompletionRequest:
    """What is wanted behind one prompt."""

    prompt_ids: list[int]
    sampling: SamplingParams
    answers: int = 1
    session: str | None = None
    seed: int | None = None  # None: one that nobody else draws from
    number: int = 0  # of the prompt in its request


class CompletionBackend(Protocol):
    @property
    def most_waiting(self) -> int:
        """Answers at once; whoever asks beyond them is turned away."""

    @property
    def waiting(self) -> int:
        """Answers that were asked for and are not there yet."""

    @property
    def closed(self) -> bool:
        """Whether nothing is drawn any more."""

    async def draw(self, turn: CompletionRequest) -> list[Rollout]: ...

    def close(self, error: Exception) -> None:
        """Whoever still waits gets this, and whoever comes later."""


class LocalBackend:
    """At a desk of this process."""

    def __init__(self, desk: RequestQueue, seed: int):
        """`seed`: from which turns draw that have none."""
        self.desk, self.seed = desk, seed
        self.most_waiting = desk.most_waiting
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return self.desk.waiting

    @property
    def closed(self) -> bool:
        return self.desk.closed

    def close(self, error: Exception) -> None:
        self.desk.close(error)

    def asks(self, turn: CompletionRequest) -> list[QueuedRequest]:
        """One for each answer."""
        if (seed := turn.seed) is None:
            seed = stream_seed(self.seed, turn.session, next(self._numbers))
        seed = request_seed(seed, turn.number) if turn.number else seed
        seeds = [seed, *(request_seed(seed, answer) for answer in range(1, turn.answers))]
        return [QueuedRequest(turn.prompt_ids, own, turn.sampling, turn.session) for own in seeds]

    async def draw(self, turn: CompletionRequest) -> list[Rollout]:
        asks = self.asks(turn)
        try:
            self.desk.ask(*asks)
            return list(await asyncio.gather(*(asyncio.wrap_future(ask.answer) for ask in asks)))
        finally:
            for ask in asks:
                ask.answer.cancel()
