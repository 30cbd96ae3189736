"""Rollout workers whose groups may span weight updates.

On a pause, unfinished samples become partial rollouts; later the engine resumes them with the current weights. When all
samples of a group have finished, the rewards near the engine score it. Several groups are scored at once in threads, so
that a slow reward for one delays no other.

    AsyncRolloutWorker       an engine that shares the policy's processes: it generates while `collect` is called
    ThreadedRolloutWorker    an engine in its own process: a thread generates all the time, also while the policy learns

All processes of a sharded policy generate and pause together, also those without a group. The ranks of a
tensor-parallel group have the same groups, generate the same samples and continue or stop together: their first rank
scores and decides.

The thread and its caller take no lock for state they share: each access is one that Python executes atomically.
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
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_files import GENERATING, SCORING, ReportedSpan, Spans
from trimtab.train.rl.rollout_worker import (
    Admission,
    Collected,
    FailedGroup,
    FinishedGroup,
    InFlightGroup,
    RewardClock,
    RolloutWorker,
    SampleScorer,
    Wait,
    failed_groups,
    rollout_too_large,
    unrewarded_groups,
)
from trimtab.train.update import InsufficientMemory, memory_guard

LOOK_EVERY = 0.05  # seconds between two checks for a stop signal while waiting for rewards
TO_END = 5.0  # seconds to wait for the thread to end


class GroupScorer:
    """Scores finished groups in threads. `changed`: notified when there is something to take."""

    def __init__(self, rewards: Parts, tokenizer: Any, spans: Spans, clock: RewardClock):
        self.rewards, self.tokenizer, self.spans, self.clock = rewards, tokenizer, spans, clock
        self.changed = threading.Condition()
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="rewards")
        self._scored: list[tuple[int, int, Sequence[Trajectory], list[RewardResult]]] = []
        self._failure: BaseException | None = None

    def submit(self, place: int, prompt_batch: PromptBatch, rollouts: Sequence[Trajectory]) -> None:
        """Score all samples of one prompt, given in order."""
        if not self.rewards:
            return self._add(place, prompt_batch, rollouts, [])
        scorer = SampleScorer(self.rewards, prompt_batch, self.tokenizer, self.clock)
        assert scorer.concurrent, "a reward model is another role"
        # Decode here: tokenizers are not thread-safe.
        self._threads.submit(self._score, place, scorer, scorer.request(rollouts), rollouts)

    def _score(self, place: int, scorer: SampleScorer, request: RewardRequest, rollouts: Sequence[Trajectory]) -> None:
        try:
            with self.spans.during(SCORING):
                results = scorer.score(request, rollouts)
            self._add(place, scorer.prompt_batch, rollouts, results)
        except RunStopped:
            pass  # the group is saved as it is
        except BaseException as error:
            with self.changed:
                self._failure = self._failure or error
                self.changed.notify_all()

    def _add(
        self, place: int, prompt_batch: PromptBatch, rollouts: Sequence[Trajectory], results: list[RewardResult]
    ) -> None:
        with self.changed:
            self._scored.append((place, prompt_batch.rows[0], rollouts, results))
            self.changed.notify_all()

    @property
    def ready(self) -> bool:
        return bool(self._scored) or self._failure is not None

    def take(self) -> tuple[list[FinishedGroup], list[FailedGroup]]:
        """Groups scored since the last call, and those without a reward; raises the failure of a reward that ends the
        run. Tensors are built here, not in the threads."""
        with self.changed:
            if self._failure is not None:
                raise self._failure
            scored, self._scored = self._scored, []
        finished: list[FinishedGroup] = []
        failed: list[FailedGroup] = []
        for place, row, rollouts, results in scored:
            if lost := unrewarded_groups(rollouts, results):
                failed.append(replace(lost[0], prompt=place))
            else:
                finished.append(FinishedGroup(place, Experience.of([row] * len(rollouts), rollouts), results))
        return finished, failed

    def close(self) -> None:
        """Drop groups whose scoring has not begun; running rewards finish by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class GroupState:
    """The samples of one prompt, from its admission until they are collected."""

    def __init__(self, group: InFlightGroup, question: PromptBatch, samples: int):
        self.group, self.question = group, question
        found = by_sample(group.trajectories)
        # An episode in several sequences has a trajectory for each.
        self.trajectories = [found.get(sample) or [Trajectory.empty(sample)] for sample in range(samples)]
        self.since = time.monotonic()  # when it was last passed to the engine or to the rewards

    @property
    def open(self) -> list[Trajectory]:
        """Trajectories without a finish reason."""
        return [trajectory for own in self.trajectories for trajectory in own if trajectory.finish is None]

    @property
    def fresh(self) -> bool:
        """Whether no token has been generated."""
        return not any(map(_begun, _flat(self.trajectories)))

    def in_flight(self, newer: list[Trajectory]) -> InFlightGroup:
        """The group for a checkpoint; `newer`: the current state of its open trajectories."""
        trajectories = list(self.trajectories)
        for sample, own in by_sample(newer).items():
            known = trajectories[sample]
            if known[0].finish is None and tokens_of(own) > tokens_of(known):
                trajectories[sample] = own
        found = _flat(trajectories)
        return replace(self.group, trajectories=found if any(map(_begun, found)) else [])

    def put(self, trajectories: list[Trajectory]) -> int:
        """Replace the trajectories of one sample; returns the number of newly sampled tokens."""
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
    """Number of tokens, observations included."""
    return sum(len(trajectory.tokens) for trajectory in trajectories)


def drawn_of(trajectories: Iterable[Trajectory]) -> int:
    """Number of tokens sampled by the model; only they have log-probs."""
    return sum(len(trajectory.log_probs) for trajectory in trajectories)


class AsyncRolloutWorker(RolloutWorker):
    """A worker in the policy's process: it generates while `collect` is called."""

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self._spans = Spans()
        self._scorer = GroupScorer(self.rewards, self.tokenizer, self._spans, self.clock)
        self._changed = self._scorer.changed
        self.sampling: SamplingParams | None = None
        self._groups: dict[int, GroupState] = {}  # by place
        self._waiting: deque[GroupState] = deque()  # not in the engine, the oldest first
        self._session: Session | None = None
        self._running: dict[int, GroupState] = {}  # by the session's numbers
        self._failed: list[FailedGroup] = []
        # Totals since the start, and the part of them already reported.
        self._taken = self._drawn = self._read_again = 0
        self._seconds = 0.0
        self._reported = (0, 0, 0.0)

    # ---- methods called by the client

    def admit(self, admission: Admission, *, sampling: SamplingParams) -> None:
        """Queue these groups: generated from the next `collect` on or, in a thread, at once unless it pauses."""
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
        """Generate, and return the groups finished and scored since the last call.

        Returns after `seconds`, as soon as there is a group if `at_once`, or when nothing is left to do. None: a stop
        was requested. Failures are returned as by `sample`; their groups remain unfinished.
        """
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
        """Pause the engine until the next `collect` or, in a thread, until `resume`; True once it is idle. `drained`: a
        thread first finishes the samples it has begun, within `seconds`."""
        if (session := self._session) is not None:
            session.abort()
            while session.has_unfinished:
                self._take(session, session.step())
            self._close_session(session)
            self.player.trim_memory()
        return True

    def resume(self) -> None:
        """Start generating, at first and after a pause. Nothing to do here: without a thread, `collect` generates."""

    def unfinished(self) -> list[InFlightGroup]:
        """All groups admitted and not collected, in their current state."""
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
        """Time spans of generation and scoring since the last call."""
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
                with own_heartbeat.waiting(), self._changed:  # rewards have their own timeout
                    self._changed.wait_for(lambda: self.ready, LOOK_EVERY)

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
        finished, unrewarded = self._scorer.take()
        failed, self._failed = [*self._failed, *unrewarded], []
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
        """Run one step of the engine. `begin`: first start the waiting groups."""
        began = time.monotonic()
        with self._spans.during(GENERATING):
            session = self._open()
            while begin and self._waiting:
                self._begin(session, self._waiting.popleft())
            if session.has_unfinished:
                self._take(session, session.step())
        self._seconds += time.monotonic() - began

    def _withdraw(self) -> None:
        """Take back groups for which the engine has generated nothing since they were added."""
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
        """After a failure of the engine: keep the tokens generated so far and close the session."""
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
        """Store finished or aborted samples. All sequences of an episode arrive together. Tokens are counted before
        another thread can collect the group, so that the count always includes the collected group's tokens."""
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
            with self._changed:
                self._failed.append(FailedGroup(state.group.place, failed[0].problem, episodes))
                self._changed.notify_all()
        else:
            self._scorer.submit(state.group.place, state.question, finished)


class ThreadedRolloutWorker(AsyncRolloutWorker):
    """A worker with a thread that generates from the first `resume` on; `collect` only waits for results.

    A caller waits at most for one step of the engine. A failure in the thread is raised by the next call.
    """

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self._paused = True  # the state requested by the caller
        self._drained = self._closed = False
        self._idle = True  # no step of the engine runs
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="writing", daemon=True)

    def admit(self, admission: Admission, *, sampling: SamplingParams) -> None:
        with self._changed:
            super().admit(admission, sampling=sampling)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def _generate(self, deadline: float | None, at_once: bool) -> None:
        with own_heartbeat.waiting(), self._changed:  # the loop's watchdog bounds this wait
            while not (self._failure is not None or self._enough(deadline, True)):
                self._changed.wait(LOOK_EVERY)
        self._check()

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the engine to be free; `pause` can be called again."""
        with self._changed:
            self._paused, self._drained = True, drained
            self._changed.notify_all()
            free = self._changed.wait_for(lambda: self._idle, seconds)
        if not isinstance(self._failure, OutOfMemory):  # out of memory has closed the session: the engine is idle
            self._check()
        return free

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(TO_END)
        if not self._thread.is_alive() and self._failure is None:  # otherwise the session is in use, or broken
            super()._end()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the thread

    def _work(self) -> None:
        try:
            with memory_guard():
                while (pausing := self._next_action()) is not None:
                    if pausing:
                        self._pause_engine()
                    else:
                        self.advance()
        except BaseException as error:
            if isinstance(error, OutOfMemory):
                self._abandon()
            with self._changed:
                self._failure, self._idle = error, True
                self._changed.notify_all()

    def _next_action(self) -> bool | None:
        """Wait for work; True: pause, False: generate, None: end the thread."""
        with self._changed:
            if not self._has_work():
                own_heartbeat.rest()
                self._changed.wait_for(self._has_work)
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
        with self._changed:
            own_heartbeat.rest()
            self._idle = True
            self._changed.notify_all()
