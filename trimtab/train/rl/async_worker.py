"""Rollout workers whose groups may outlive an update of the weights.

Groups are generated for a while. To pause, samples that have not finished become partial rollouts; later the engine
resumes them with the weights as they are then. A group whose samples have all finished is scored by the rewards near
the engine, several groups at once in threads: a reward that is slow for one of them delays no other.

    AsyncRolloutWorker       an engine that shares the policy's processes: it generates while `collect` is called
    ThreadedRolloutWorker    an engine in its own process: a thread generates all the time, also while the policy learns

All processes of a split policy generate and pause together, also those that have no group. Those of a tensor-parallel
group have the same groups, generate the same samples and go on or stop together: the first of them scores and decides.

The thread and its caller do not wait for each other: each of their steps on what they share is one that Python does not
interrupt.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import OutOfMemory
from trimtab.rewards.build import Parts
from trimtab.rewards.functions import CALLS_AT_ONCE
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult
from trimtab.rollout.engine import Session
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.micro_batch_limit import InsufficientMemory, memory_guard
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_files import GENERATING, SCORING, ReportedSpan, Spans
from trimtab.train.rl.rollout_worker import (
    Admission,
    Collected,
    FailedGroup,
    FinishedGroup,
    InFlightGroup,
    RolloutWorker,
    SampleScorer,
    Wait,
    failed_groups,
    rollout_too_large,
)

LOOK_EVERY = 0.05  # seconds after which a signal is noticed while rewards are waited for
TO_END = 5.0  # seconds that the thread has to end


class GroupScorer:
    """Scores finished groups in threads. `news`: notified when there is something to take."""

    def __init__(self, rewards: Parts, tokenizer: Any, spans: Spans):
        self.rewards, self.tokenizer, self.spans = rewards, tokenizer, spans
        self.news = threading.Condition()
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="rewards")
        self._scored: list[tuple[int, int, Sequence[Trajectory], list[RewardResult]]] = []
        self._failure: BaseException | None = None

    def submit(self, place: int, prompt_batch: PromptBatch, rollouts: Sequence[Trajectory]) -> None:
        """All samples of the one prompt, in order."""
        if not self.rewards:
            return self._add(place, prompt_batch, rollouts, [])
        scorer = SampleScorer(self.rewards, prompt_batch, self.tokenizer)
        assert scorer.concurrent, "a reward model is another role"
        # Text is made here: a tokenizer is not for many threads.
        self._threads.submit(self._score, place, scorer, scorer.request(rollouts), rollouts)

    def _score(self, place: int, scorer: SampleScorer, request: RewardRequest, rollouts: Sequence[Trajectory]) -> None:
        try:
            with self.spans.during(SCORING):
                results = scorer.score(request, rollouts)
            self._add(place, scorer.prompt_batch, rollouts, results)
        except RunStopped:
            pass  # the group is saved as it is
        except BaseException as error:
            with self.news:
                self._failure = self._failure or error
                self.news.notify_all()

    def _add(
        self, place: int, prompt_batch: PromptBatch, rollouts: Sequence[Trajectory], results: list[RewardResult]
    ) -> None:
        with self.news:
            self._scored.append((place, prompt_batch.rows[0], rollouts, results))
            self.news.notify_all()

    @property
    def ready(self) -> bool:
        return bool(self._scored) or self._failure is not None

    def take(self) -> list[FinishedGroup]:
        """What was scored since the last time; raises what a reward has failed with. Tensors are made here, not in the
        threads."""
        with self.news:
            if self._failure is not None:
                raise self._failure
            scored, self._scored = self._scored, []
        return [
            FinishedGroup(place, Experience.of([row] * len(rollouts), rollouts), results)
            for place, row, rollouts, results in scored
        ]

    def close(self) -> None:
        """Groups whose scoring has not begun are dropped. The others end with their rewards."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class GroupState:
    """The samples of one prompt, from its admission until they are collected."""

    def __init__(self, group: InFlightGroup, question: PromptBatch, samples: int):
        self.group, self.question = group, question
        found = by_sample(group.trajectories)
        # An episode in several sequences has a trajectory for each.
        self.trajectories = [found.get(sample) or [Trajectory.empty(sample)] for sample in range(samples)]
        self.since = time.monotonic()  # when it was last given to the engine, or to the rewards

    @property
    def open(self) -> list[Trajectory]:
        """Trajectories without a finish reason."""
        return [trajectory for own in self.trajectories for trajectory in own if trajectory.finish is None]

    @property
    def fresh(self) -> bool:
        """Whether nothing is generated."""
        return not any(map(_begun, _flat(self.trajectories)))

    def in_flight(self, newer: list[Trajectory]) -> InFlightGroup:
        """`newer`: what its open trajectories have become."""
        trajectories = list(self.trajectories)
        for sample, own in by_sample(newer).items():
            known = trajectories[sample]
            if known[0].finish is None and tokens_of(own) > tokens_of(known):
                trajectories[sample] = own
        found = _flat(trajectories)
        return replace(self.group, trajectories=found if any(map(_begun, found)) else [])

    def put(self, trajectories: list[Trajectory]) -> int:
        """What one sample has become; the tokens that were drawn since."""
        before, self.trajectories[trajectories[0].sample] = self.trajectories[trajectories[0].sample], trajectories
        return drawn_of(trajectories) - drawn_of(before)

    def finished(self) -> list[Trajectory]:
        (prompt,) = self.question.ids
        found = [trajectory for trajectory in _flat(self.trajectories) if trajectory.finish is not None]
        return [replace(trajectory, prompt_ids=trajectory.prompt_ids or prompt) for trajectory in found]


def _begun(trajectory: Trajectory) -> bool:
    return trajectory.finish is not None or bool(len(trajectory.tokens))


def _flat(trajectories: Iterable[list[Trajectory]]) -> list[Trajectory]:
    return [trajectory for own in trajectories for trajectory in own]


def by_sample(trajectories: Iterable[Trajectory]) -> dict[int, list[Trajectory]]:
    """Branches of an episode stay together, in their order."""
    found: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.sample, []).append(trajectory)
    return found


def tokens_of(trajectories: Iterable[Trajectory]) -> int:
    """With those of observations."""
    return sum(len(trajectory.tokens) for trajectory in trajectories)


def drawn_of(trajectories: Iterable[Trajectory]) -> int:
    """Those of the model: they alone have log-probs."""
    return sum(len(trajectory.log_probs) for trajectory in trajectories)


class AsyncRolloutWorker(RolloutWorker):
    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self._spans = Spans()
        self._scorer = GroupScorer(self.rewards, self.tokenizer, self._spans)
        self._news = self._scorer.news
        self.sampling: SamplingParams | None = None
        self._groups: dict[int, GroupState] = {}  # by place
        self._waiting: deque[GroupState] = deque()  # not in the engine, the oldest first
        self._session: Session | None = None
        self._running: dict[int, GroupState] = {}  # by the session's numbers
        self._failed: list[FailedGroup] = []
        # Sums since the beginning, and what of them has been reported.
        self._taken = self._drawn = self._read_again = 0
        self._seconds = 0.0
        self._reported = (0, 0, 0.0)

    # ---- what the client calls

    def admit(self, admission: Admission, *, sampling: SamplingParams) -> None:
        """Generate these groups too, from the next `collect` on or, in a thread, at once unless it pauses."""
        assert self.sampling in (None, sampling), "all groups of a run are sampled alike"
        self.sampling = sampling
        for index, group in enumerate(admission.groups):
            assert group.place not in self._groups, f"place {group.place} is in flight already"
            state = GroupState(group, admission.prompt_batch.take(index), sampling.n)
            self._groups[group.place] = state
            self._waiting.append(state)

    def collect(
        self, *, seconds: float | None = None, at_once: bool = True
    ) -> Collected | RewardFailed | InsufficientMemory | None:
        """Groups finished and scored since the last call, after at most `seconds` or, `at_once`, as soon as there is a
        group; also where nothing is left to generate or to score. None: the run is to stop. Failures are returned as by
        `sample`; the groups are then still among the unfinished."""
        try:
            with memory_guard():
                self._generate(None if seconds is None else time.monotonic() + seconds, at_once)
                return self._collected()
        except RewardFailed as failure:
            return failure
        except OutOfMemory as shortage:
            self._abandon()
            return rollout_too_large(shortage)

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """Whether the engine is free for others by now, until the next `collect` or, in a thread, until `resume`.
        `drained`: a thread first finishes what it has begun, within `seconds`."""
        if (session := self._session) is not None:
            session.abort()
            while session.has_unfinished:
                self._take(session, session.step())
            self._close_session(session)
            self.player.trim_memory()
        return True

    def resume(self) -> None:
        """At first, and after a pause; without a thread `collect` does so."""

    def unfinished(self) -> list[InFlightGroup]:
        """Everything that was admitted and not collected, as it is now."""
        session, running = self._session, dict(self._running)
        newer = {} if session is None else session.partials()
        so_far = {id(state): newer.get(number, []) for number, state in running.items()}
        return [state.in_flight(so_far.get(id(state), [])) for state in list(self._groups.values())]

    def waits(self) -> list[Wait]:
        now, session, later = time.monotonic(), self._session, list(self._waiting)
        running = {id(state): number for number, state in list(self._running.items())}
        lengths = {} if session is None else session.output_lengths()
        waits: list[Wait] = []
        for state in list(self._groups.values()):
            for own in [own for own in state.trajectories if own[0].finish is None] or state.trajectories:
                sample, known = own[0].sample, drawn_of(own)
                tokens = lengths.get((running.get(id(state), -1), sample), known)
                if own[0].finish is not None:
                    what = "its reward"
                elif state in later:
                    what = "a place in the engine"
                else:
                    what = "its next token" if tokens > known else "its first token from the engine"
                    what += " or its environment" if self.plays else ""
                waits.append(Wait(state.group.place, sample, what, tokens, now - state.since))
        return waits

    def spans(self) -> list[ReportedSpan]:
        """What was generated and scored when, since the last time."""
        return self._spans.taken()

    def close(self) -> None:
        self._end()
        self._scorer.close()
        super().close()

    # ---- collecting

    def _generate(self, deadline: float | None, at_once: bool) -> None:
        self._open()
        while not self.tensor.any(self._enough(deadline, at_once)):
            if self.busy:
                self.advance()
            elif self.tensor.is_rank_zero:
                with own_heartbeat.waiting(), self._news:  # a reward has its own time limit
                    self._news.wait_for(lambda: self.ready, LOOK_EVERY)

    def _enough(self, deadline: float | None, at_once: bool) -> bool:
        if not self.tensor.is_rank_zero:
            return self.stopped()
        late = deadline is not None and time.monotonic() >= deadline
        return late or (self.ready and (at_once or not self.busy)) or not self._groups or self.stopped()

    @property
    def ready(self) -> bool:
        """Whether there is a group to collect, or a failure to report."""
        return self._scorer.ready or bool(self._failed)

    def _collected(self) -> Collected | None:
        finished = self._scorer.take()
        failed, self._failed = self._failed, []
        for place in [*(group.place for group in finished), *(group.prompt for group in failed)]:
            del self._groups[place]
        if self.stopped() and not finished and not failed:
            return None
        sums, (drawn, read_again, seconds) = (self._drawn, self._read_again, self._seconds), self._reported
        self._reported = sums
        return Collected(finished, sums[0] - drawn, sums[1] - read_again, sums[2] - seconds, failed)

    def _end(self) -> None:
        if self._session is not None:
            self._session.close()

    # ---- the engine

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to generate."""
        return bool(self._waiting) or self.begun

    @property
    def begun(self) -> bool:
        """Whether the engine is in the middle of samples."""
        return self._session is not None and self._session.has_unfinished

    def advance(self, *, begin: bool = True) -> None:
        """Generate for a moment. `begin`: also groups that wait."""
        began = time.monotonic()
        with self._spans.during(GENERATING):
            session = self._open()
            while begin and self._waiting:
                self._begin(session, self._waiting.popleft())
            if session.has_unfinished:
                self._take(session, session.step())
        self._seconds += time.monotonic() - began

    def _withdraw(self) -> None:
        """Take back groups of which the engine has generated nothing since it got them."""
        if (session := self._session) is None:
            return
        lengths = session.output_lengths()
        waiting = [
            number
            for number, state in self._running.items()
            if state.open
            and all(lengths.get((number, sample)) == drawn_of(own) for sample, own in by_sample(state.open).items())
        ]
        if waiting:
            session.abort(waiting)
            self._take(session, session.step())
            self._waiting.extendleft(reversed([self._running.pop(number) for number in waiting]))

    def _abandon(self) -> None:
        """After the engine has failed: what it has generated so far is kept."""
        if (session := self._session) is not None:
            for number, trajectories in session.partials().items():
                for own in by_sample(trajectories).values():
                    self._taken += self._running[number].put(own)
            self._close_session(session)

    def _open(self) -> Session:
        if self._session is None:
            assert self.sampling is not None, "groups are admitted before they are generated"
            self._session = self.player.session(self.sampling)
        return self._session

    def _close_session(self, session: Session) -> None:
        session.close()
        self._session = None
        self._waiting.extendleft(reversed([state for state in self._running.values() if state.open]))
        self._running.clear()

    def _begin(self, session: Session, state: GroupState) -> None:
        state.since = time.monotonic()
        if not state.open:  # only its rewards are missing
            return self._score(state)
        (ids,), (seed,) = state.question.ids, state.question.seeds
        task = state.question.tasks()[0] if self.plays else None
        number = session.add(ids, seed=seed, partials=None if state.fresh else state.open, task=task)
        self._running[number] = state
        self._read_again += tokens_of(state.open)

    def _take(self, session: Session, rollouts: Sequence[Trajectory]) -> None:
        """Of an episode all sequences come together. Tokens are counted before a group can be collected by another
        thread, so that a group's own are never missing from the count."""
        found: dict[tuple[int, int], list[Trajectory]] = {}
        for rollout in rollouts:
            found.setdefault((rollout.prompt, rollout.sample), []).append(rollout.stored())
        for (number, _), trajectories in found.items():
            self._taken += self._running[number].put(trajectories)
        lengths = session.output_lengths()
        known = sum(drawn_of(self._running[number].open) for number in {number for number, _ in lengths})
        self._drawn = self._taken + sum(lengths.values()) - known
        for number in dict.fromkeys(number for number, _ in found):
            if not (state := self._running[number]).open:
                self._score(state)

    def _score(self, state: GroupState) -> None:
        state.since = time.monotonic()
        finished = state.finished()
        failed = failed_groups(rollout for rollout in finished if rollout.finish == "failed")
        if failed:
            episodes = sum(group.episodes for group in failed)
            with self._news:
                self._failed.append(FailedGroup(state.group.place, failed[0].problem, episodes))
                self._news.notify_all()
        else:
            self._scorer.submit(state.group.place, state.question, finished)


class ThreadedRolloutWorker(AsyncRolloutWorker):
    """`collect` only waits, and nothing is generated before the first `resume`. A caller waits at most until the thread
    is between two steps of the engine. What fails in the thread is raised in the next call."""

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self._paused = True  # as the caller wants it
        self._drained = self._closed = False
        self._idle = True  # the engine is free
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="writing", daemon=True)

    def admit(self, admission: Admission, *, sampling: SamplingParams) -> None:
        with self._news:
            super().admit(admission, sampling=sampling)
            if self._thread.ident is None:
                self._thread.start()
            self._news.notify_all()

    def _generate(self, deadline: float | None, at_once: bool) -> None:
        with own_heartbeat.waiting(), self._news:  # the loop has a limit for it
            while not (self._failure is not None or self._enough(deadline, True)):
                self._news.wait(LOOK_EVERY)
        self._check()

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the engine to be free; `pause` can be called again."""
        with self._news:
            self._paused, self._drained = True, drained
            self._news.notify_all()
            free = self._news.wait_for(lambda: self._idle, seconds)
        if not isinstance(self._failure, OutOfMemory):  # after which the engine is free
            self._check()
        return free

    def resume(self) -> None:
        with self._news:
            self._paused = False
            self._news.notify_all()

    def _end(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread.ident is not None:
            self._thread.join(TO_END)
        if not self._thread.is_alive() and self._failure is None:  # else the session is in use, or broken
            super()._end()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the thread

    def _work(self) -> None:
        try:
            with memory_guard():
                while (pausing := self._next_wish()) is not None:
                    if pausing:
                        self._pause_engine()
                    else:
                        self.advance()
        except BaseException as error:
            if isinstance(error, OutOfMemory):
                self._abandon()
            with self._news:
                self._failure, self._idle = error, True
                self._news.notify_all()

    def _next_wish(self) -> bool | None:
        """When there is something to do: whether that is to pause. None: to end."""
        with self._news:
            if not self._has_work():
                own_heartbeat.rest()
                self._news.wait_for(self._has_work)
            if self._closed:
                return None
            if not self._paused:
                self._idle = False
            return self._paused

    def _has_work(self) -> bool:
        return self._closed or (not self._idle if self._paused else self.busy)

    def _pause_engine(self) -> None:
        if self._drained:
            self._withdraw()
            while self.begun and self._paused and self._drained and not self._closed:
                self.advance(begin=False)
            if not self._paused:
                return
        super().pause()
        with self._news:
            own_heartbeat.rest()
            self._idle = True
            self._news.notify_all()
