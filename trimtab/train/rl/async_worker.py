"""Groups of answers that outlive an update, in one process that writes them.

They are written for a while. To pause, those that have not finished become partial rollouts; later an engine reads them
again with the weights as they are then, and resumes. A group whose answers have all finished is scored (judging.py) and
handed over.

Of a policy that is split over processes, all of them write and pause together, if there is nothing to write for some.
Those of a tensor group have the same groups, write the same answers and go on or stop together: the first of them
judges, and decides.

Another thread than the one that writes may admit, take what was handed over, and ask (writing_beside.py). Neither waits
for the other: each of their steps on what they share is one that Python does not interrupt.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from trimtab.distributed.process_group import Peers
from trimtab.distributed.supervision import pulse
from trimtab.errors import OutOfMemory
from trimtab.rewards.build import Parts
from trimtab.rewards.functions import CALLS_AT_ONCE
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult
from trimtab.rollout.engine import Engine, Session
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.micro_batch_limit import NoRoom, memory_guard
from trimtab.train.rl.async_groups import Admission, Collected, InFlightGroup, LeftOut, Wait, Written
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_files import JUDGING, WRITING, Spans, Told
from trimtab.train.rl.rollout_worker import Answers, Failed, RolloutWorker, SampleScorer, rollout_too_large

LOOK_EVERY = 0.05  # seconds after which a signal is noticed while rewards are waited for


class GroupScorer:
    """Of whole groups, in threads of its own. `news`: notified when there is something to take."""

    def __init__(self, rewards: Parts, tokenizer: Any, spans: Spans):
        self.rewards, self.tokenizer, self.spans = rewards, tokenizer, spans
        self.news = threading.Condition()
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="rewards")
        self._judged: list[Judged] = []
        self._failure: BaseException | None = None

    def submit(self, place: int, questions: PromptBatch, rollouts: Sequence[Trajectory]) -> None:
        """All answers to the one question, in order."""
        if not self.rewards:
            return self._tell(Judged(place, questions, rollouts, []))
        several = SampleScorer(self.rewards, questions, self.tokenizer)
        assert several.concurrent, "a model is a role of its own, and judges elsewhere"
        # Text is made here: a tokenizer is not for many threads.
        self._threads.submit(self._judge, place, several, several.request(rollouts), rollouts)

    def _judge(self, place: int, several: SampleScorer, request: RewardRequest, rollouts: Sequence[Trajectory]) -> None:
        try:
            with self.spans.during(JUDGING):
                results = several.judge(request, rollouts)
            self._tell(Judged(place, several.questions, rollouts, results))
        except RunStopped:
            pass  # the run has been told to stop, and nobody waits for this group: it is saved as it is
        except BaseException as error:
            with self.news:
                self._failure = self._failure or error
                self.news.notify_all()

    def _tell(self, judged: "Judged") -> None:
        with self.news:
            self._judged.append(judged)
            self.news.notify_all()

    @property
    def ready(self) -> bool:
        return bool(self._judged) or self._failure is not None

    def take(self) -> list[Written]:
        """What was judged since the last time; raises what a reward has failed with."""
        with self.news:
            if self._failure is not None:
                raise self._failure
            judged, self._judged = self._judged, []
        return [group.written() for group in judged]

    def close(self) -> None:
        """What has not begun is dropped. What has ends with its rewards."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Judged:
    """A group, and what each reward says of it. Tensors are made of it where it is taken, not in a thread."""

    place: int
    questions: PromptBatch
    rollouts: Sequence[Trajectory]
    results: list[RewardResult]

    def written(self) -> Written:
        rows = [self.questions.rows[rollout.prompt] for rollout in self.rollouts]
        return Written(self.place, Answers(Experience.of(rows, self.rollouts), self.results))


class GroupState:
    """The answers to one prompt, from its admission until they are handed over."""

    def __init__(self, group: InFlightGroup, question: PromptBatch, samples: int):
        self.group, self.question = group, question
        found = by_sample(group.trajectories)
        # An episode in several sequences has a trajectory for each.
        self.trajectories = [found.get(sample) or [Trajectory.empty(sample)] for sample in range(samples)]
        self.since = time.monotonic()  # when it was last handed on: to the engine, to the rewards

    @property
    def open(self) -> list[Trajectory]:
        """Those that have not ended."""
        return [trajectory for own in self.trajectories for trajectory in own if trajectory.finish is None]

    @property
    def fresh(self) -> bool:
        """Whether nothing is written."""
        return all(
            trajectory.finish is None and not len(trajectory.tokens) for own in self.trajectories for trajectory in own
        )

    def under_way(self, newer: list[Trajectory]) -> InFlightGroup:
        """`newer`: what its open trajectories have become."""
        trajectories = list(self.trajectories)
        for sample, own in by_sample(newer).items():
            known = trajectories[sample]
            if known[0].finish is None and tokens_of(own) > tokens_of(known):
                trajectories[sample] = own
        found = [trajectory for own in trajectories for trajectory in own]
        begun = any(trajectory.finish is not None or len(trajectory.tokens) for trajectory in found)
        return replace(self.group, trajectories=found if begun else [])

    def put(self, trajectories: list[Trajectory]) -> int:
        """What one sample has become; the tokens that were drawn since."""
        before, self.trajectories[trajectories[0].sample] = self.trajectories[trajectories[0].sample], trajectories
        return drawn_of(trajectories) - drawn_of(before)

    def rollouts(self) -> list[Trajectory]:
        (prompt,) = self.question.ids
        return [
            replace(trajectory, prompt_ids=trajectory.prompt_ids or prompt)
            for own in self.trajectories
            for trajectory in own
            if trajectory.finish is not None
        ]

    def left_out(self) -> LeftOut | None:
        """Why it cannot be learnt from, if it cannot."""
        failed = Failed.of(rollout for rollout in self.rollouts() if rollout.finish == "failed")
        return LeftOut(self.group.place, failed.words[0], failed.episodes) if failed.words else None


def by_sample(trajectories: Iterable[Trajectory]) -> dict[int, list[Trajectory]]:
    """Branches of an episode stay together, in their order."""
    found: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.sample, []).append(trajectory)
    return found


def tokens_of(trajectories: Iterable[Trajectory]) -> int:
    """What the world has said among them."""
    return sum(len(trajectory.tokens) for trajectory in trajectories)


def drawn_of(trajectories: Iterable[Trajectory]) -> int:
    """Those of them that the model drew: they alone have log-probs."""
    return sum(len(trajectory.log_probs) for trajectory in trajectories)


class GroupGenerator:
    def __init__(
        self,
        engine: Engine,
        judging: GroupScorer,
        stopped: Callable[[], bool],
        tensor: Peers,
        *,
        plays: bool = False,
    ):
        """`plays`: the engine has an environment play its part."""
        self.engine, self.judging, self.stopped, self.tensor, self.plays = engine, judging, stopped, tensor, plays
        self.sampling: SamplingParams | None = None
        self._sheets: dict[int, GroupState] = {}  # by place
        self._next: deque[GroupState] = deque()  # not in the engine, the oldest first
        self._session: Session | None = None
        self._asked: dict[int, GroupState] = {}  # by the session's numbers
        self._left_out: list[LeftOut] = []
        # Sums since the beginning, and what of them has been told.
        self._taken = self._drawn = self._read_again = 0
        self._seconds = 0.0
        self._told = (0, 0, 0.0)

    # ---- what the loop asks

    def admit(self, admission: Admission, sampling: SamplingParams) -> None:
        assert self.sampling in (None, sampling), "all groups of a run are drawn alike"
        self.sampling = sampling
        for index, group in enumerate(admission.groups):
            assert group.place not in self._sheets, f"place {group.place} is under way already"
            sheet = GroupState(group, admission.questions.take(index), sampling.n)
            self._sheets[group.place] = sheet
            self._next.append(sheet)

    def collect(self, seconds: float | None = None, *, at_once: bool = True) -> Collected | None:
        """Write for so many seconds or, `at_once`, until a group is whole and judged; what has been done since the last
        time. None: told to stop. It ends where there is nothing to write and nothing to judge."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._opened()
        while not self.tensor.any(self._enough(deadline, at_once)):
            if self.busy:
                self.advance()
            elif self.tensor.leads:
                with pulse.waiting(), self.judging.news:  # a reward has a limit of its own
                    self.judging.news.wait_for(lambda: self.ready, LOOK_EVERY)
        return self.handed_over()

    def _enough(self, deadline: float | None, at_once: bool) -> bool:
        if not self.tensor.leads:
            return self.stopped()
        late = deadline is not None and time.monotonic() >= deadline
        ready = self.ready and (at_once or not self.busy)
        return late or ready or not self._sheets or self.stopped()

    @property
    def ready(self) -> bool:
        """Whether there is a group to hand over, or a failure to tell."""
        return self.judging.ready or bool(self._left_out)

    def handed_over(self) -> Collected | None:
        written = self.judging.take()
        left_out, self._left_out = self._left_out, []
        for place in [*(found.place for found in written), *(found.place for found in left_out)]:
            del self._sheets[place]
        if self.stopped() and not written and not left_out:
            return None
        sums, (drawn, read_again, seconds) = (self._drawn, self._read_again, self._seconds), self._told
        self._told = sums
        return Collected(written, sums[0] - drawn, sums[1] - read_again, sums[2] - seconds, left_out)

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """Set everything down at once: the engine is free for others until the next `collect`."""
        if (session := self._session) is not None:
            session.abort()
            while session.has_unfinished:
                self._take(session, session.step())
            self._close(session)
            self.engine.trim_memory()
        return True

    def go_on(self) -> None:
        """The next `collect` does."""

    @property
    def empty(self) -> bool:
        """Nothing is under way."""
        return not self._sheets

    def unfinished(self) -> list[InFlightGroup]:
        """Everything that was admitted and not handed over, as it is now."""
        session, asked = self._session, dict(self._asked)
        newer = {} if session is None else session.partials()
        so_far = {id(sheet): newer.get(number, []) for number, sheet in asked.items()}
        return [sheet.under_way(so_far.get(id(sheet), [])) for sheet in list(self._sheets.values())]

    def waits(self) -> list[Wait]:
        now, session, later = time.monotonic(), self._session, list(self._next)
        asked = {id(sheet): number for number, sheet in list(self._asked.items())}
        lengths = {} if session is None else session.output_lengths()
        waits: list[Wait] = []
        for sheet in list(self._sheets.values()):
            for own in [own for own in sheet.trajectories if own[0].finish is None] or sheet.trajectories:
                sample, known = own[0].sample, drawn_of(own)
                tokens = lengths.get((asked.get(id(sheet), -1), sample), known)
                if own[0].finish is not None:
                    what = "its reward"
                elif sheet in later:
                    what = "a place in the engine"
                else:
                    what = "its next token" if tokens > known else "its first token from the engine"
                    what += " or its environment" if self.plays else ""
                waits.append(Wait(sheet.group.place, sample, what, tokens, now - sheet.since))
        return waits

    # ---- the engine

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to write."""
        return bool(self._next) or (self._session is not None and self._session.has_unfinished)

    def advance(self, *, begin: bool = True) -> None:
        """Write for a moment. `begin`: also what has not begun."""
        began = time.monotonic()
        with self.judging.spans.during(WRITING):
            session = self._opened()
            while begin and self._next:
                self._begin(session, self._next.popleft())
            if session.has_unfinished:
                self._take(session, session.step())
        self._seconds += time.monotonic() - began

    def withdraw(self) -> None:
        """Groups of which the engine has written nothing since it got them have not begun: it gives them back."""
        if (session := self._session) is None:
            return
        lengths = session.output_lengths()
        waiting = [
            number
            for number, sheet in self._asked.items()
            if sheet.open
            and all(lengths.get((number, sample)) == drawn_of(own) for sample, own in by_sample(sheet.open).items())
        ]
        if waiting:
            session.abort(waiting)
            self._take(session, session.step())
            self._next.extendleft(reversed([self._asked.pop(number) for number in waiting]))

    @property
    def begun(self) -> bool:
        """Whether the engine is in the middle of answers."""
        return self._session is not None and self._session.has_unfinished

    def abandon(self) -> None:
        """After the engine has failed: what it has said so far is kept."""
        if (session := self._session) is None:
            return
        for number, trajectories in session.partials().items():
            for own in by_sample(trajectories).values():
                self._taken += self._asked[number].put(own)
        self._close(session)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _close(self, session: Session) -> None:
        session.close()
        self._session = None
        self._next.extendleft(reversed([sheet for sheet in self._asked.values() if sheet.open]))
        self._asked.clear()

    def _opened(self) -> Session:
        if self._session is None:
            assert self.sampling is not None, "groups are admitted before they are written"
            self._session = self.engine.session(self.sampling)
        return self._session

    def _begin(self, session: Session, sheet: GroupState) -> None:
        sheet.since = time.monotonic()
        if not sheet.open:  # only its rewards are missing
            return self._judge(sheet)
        (ids,), (seed,) = sheet.question.ids, sheet.question.seeds
        task = sheet.question.tasks()[0] if self.plays else None
        number = session.add(ids, seed=seed, partials=None if sheet.fresh else sheet.open, task=task)
        self._asked[number] = sheet
        self._read_again += tokens_of(sheet.open)

    def _take(self, session: Session, rollouts: Sequence[Trajectory]) -> None:
        """Of an episode all sequences come together. Tokens are counted before a group can be collected by another
        thread, so that a group's own are never missing from the count."""
        found: dict[tuple[int, int], list[Trajectory]] = {}
        for rollout in rollouts:
            found.setdefault((rollout.prompt, rollout.sample), []).append(rollout.stored())
        for (number, _), trajectories in found.items():
            self._taken += self._asked[number].put(trajectories)
        lengths = session.output_lengths()
        known = sum(drawn_of(self._asked[number].open) for number in {number for number, _ in lengths})
        self._drawn = self._taken + sum(lengths.values()) - known
        for number in dict.fromkeys(number for number, _ in found):
            if not (sheet := self._asked[number]).open:
                self._judge(sheet)

    def _judge(self, sheet: GroupState) -> None:
        sheet.since = time.monotonic()
        if (left_out := sheet.left_out()) is not None:
            with self.judging.news:
                self._left_out.append(left_out)
                self.judging.news.notify_all()
        else:
            self.judging.submit(sheet.group.place, sheet.question, sheet.rollouts())


# ---- a thread that generates all the time


TO_END = 5.0  # seconds for the thread when all is over


class GeneratorThread:
    """Like Writing, but `collect` only waits, and nothing is written before the first `go_on`. What goes wrong in the
    thread is raised where something is asked."""

    def __init__(self, writing: GroupGenerator):
        self._writing = writing
        self._news = writing.judging.news
        self._paused = True  # wishes
        self._drained = self._closed = False
        self._idle = True  # the engine is nobody's
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="writing", daemon=True)

    # ---- what the loop asks

    def admit(self, admission: Admission, sampling: SamplingParams) -> None:
        with self._news:
            self._writing.admit(admission, sampling)
            if self._thread.ident is None:
                self._thread.start()
            self._news.notify_all()

    def collect(self, seconds: float | None = None, *, at_once: bool = True) -> Collected | None:
        deadline = None if seconds is None else time.monotonic() + seconds
        with pulse.waiting(), self._news:  # the loop has a limit for it
            while not self._enough(deadline):
                self._news.wait(LOOK_EVERY)
        self._check()
        return self._writing.handed_over()

    def _enough(self, deadline: float | None) -> bool:
        writing, late = self._writing, deadline is not None and time.monotonic() >= deadline
        return late or writing.ready or self._failure is not None or writing.empty or writing.stopped()

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """`drained`: what was begun ends first. Whether the engine is free by now: after so many seconds it may not be,
        and can be asked for again."""
        with self._news:
            self._paused, self._drained = True, drained
            self._news.notify_all()
            free = self._news.wait_for(lambda: self._idle, seconds)
        if not isinstance(self._failure, OutOfMemory):  # after which the engine is free
            self._check()
        return free

    def go_on(self) -> None:
        with self._news:
            self._paused = False
            self._news.notify_all()

    def unfinished(self) -> list[InFlightGroup]:
        return self._writing.unfinished()

    def waits(self) -> list[Wait]:
        return self._writing.waits()

    def abandon(self) -> None:
        """The thread has done so before it told of its failure."""

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread.ident is not None:
            self._thread.join(TO_END)
        if not self._thread.is_alive() and self._failure is None:  # else the session is in use, or cannot be spoken to
            self._writing.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the thread

    def _work(self) -> None:
        try:
            with memory_guard():
                while (pausing := self._next_wish()) is not None:
                    if not pausing:
                        self._writing.advance()
                    else:
                        self._set_down()
        except OutOfMemory as shortage:
            self._writing.abandon()
            self._fail(shortage)
        except BaseException as error:
            self._fail(error)

    def _next_wish(self) -> bool | None:
        """When there is something to do: whether that is to pause. None: all is over."""
        with self._news:
            if not self._has_work():
                pulse.rest()
                self._news.wait_for(self._has_work)
            if self._closed:
                return None
            if not self._paused:
                self._idle = False
            return self._paused

    def _has_work(self) -> bool:
        return self._closed or (not self._idle if self._paused else self._writing.busy)

    def _set_down(self) -> None:
        if self._drained:
            self._writing.withdraw()
            while self._writing.begun and self._paused and self._drained and not self._closed:
                self._writing.advance(begin=False)
            if not self._paused:
                return
        self._writing.pause()
        with self._news:
            pulse.rest()
            self._idle = True
            self._news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._failure, self._idle = error, True
            self._news.notify_all()


class AsyncRolloutWorker(RolloutWorker):
    """A rollout worker whose groups may outlive an update of the weights."""

    def __init__(self, *arguments: Any, beside: bool = False, **more: Any):
        """`beside`: the engine can write while the policy learns."""
        super().__init__(*arguments, **more)
        self._spans = Spans()
        self._judging = GroupScorer(self.rewards, self.tokenizer, self._spans)
        writing = GroupGenerator(self.player, self._judging, self.stopped, self.tensor, plays=self.plays)
        self.writing: GroupGenerator | GeneratorThread = GeneratorThread(writing) if beside else writing

    def close(self) -> None:
        self.writing.close()
        self._judging.close()
        super().close()

    def admit(self, admission: Admission, *, sampling: SamplingParams) -> None:
        """Write these groups too, from the next `collect` on or, an engine of its own, unless it pauses."""
        self.writing.admit(admission, sampling)

    def collect(
        self, *, seconds: float | None = None, at_once: bool = True
    ) -> Collected | RewardFailed | NoRoom | None:
        """What was written and judged since the last time, after so many seconds or, `at_once`, as soon as there is a
        group; who writes by itself is not held up by either.
        None: told to stop. Failures are handed back as by `sample`; the groups are then still among the unfinished."""
        try:
            with memory_guard():
                return self.writing.collect(seconds, at_once=at_once)
        except RewardFailed as failure:
            return failure
        except OutOfMemory as shortage:
            self.writing.abandon()
            return rollout_too_large(shortage)

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """Whether the engine is free for others by now, until it is told to go on or, where the policy is in this
        process, to `collect`. `drained`: an engine that writes by itself first ends what it has begun, if that takes no
        more than so many seconds."""
        return self.writing.pause(drained=drained, seconds=seconds)

    def go_on(self) -> None:
        """At first, and after a pause."""
        self.writing.go_on()

    def unfinished(self) -> list[InFlightGroup]:
        return self.writing.unfinished()

    def waits(self) -> list[Wait]:
        return self.writing.waits()

    def spans(self) -> list[Told]:
        """What was written and judged when, since the last time."""
        return self._spans.taken()
