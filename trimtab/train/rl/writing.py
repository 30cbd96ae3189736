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

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from trimtab.distributed.process_group import Peers
from trimtab.distributed.supervision import pulse
from trimtab.rewards.requests import PromptBatch
from trimtab.rollout.engine import Engine, Session
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.answers import Admission, Collected, Failed, LeftOut, UnderWay, Wait
from trimtab.train.rl.judging import Judging
from trimtab.train.rl.spans import WRITING

LOOK_EVERY = 0.05  # seconds after which a signal is noticed while rewards are waited for


class Sheet:
    """The answers to one prompt, from its admission until they are handed over."""

    def __init__(self, group: UnderWay, question: PromptBatch, samples: int):
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

    def under_way(self, newer: list[Trajectory]) -> UnderWay:
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


class Writing:
    def __init__(
        self,
        engine: Engine,
        judging: Judging,
        stopped: Callable[[], bool],
        tensor: Peers,
        *,
        plays: bool = False,
    ):
        """`plays`: the engine has an environment play its part."""
        self.engine, self.judging, self.stopped, self.tensor, self.plays = engine, judging, stopped, tensor, plays
        self.sampling: SamplingParams | None = None
        self._sheets: dict[int, Sheet] = {}  # by place
        self._next: deque[Sheet] = deque()  # not in the engine, the oldest first
        self._session: Session | None = None
        self._asked: dict[int, Sheet] = {}  # by the session's numbers
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
            sheet = Sheet(group, admission.questions.take(index), sampling.n)
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

    def unfinished(self) -> list[UnderWay]:
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

    def _begin(self, session: Session, sheet: Sheet) -> None:
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

    def _judge(self, sheet: Sheet) -> None:
        sheet.since = time.monotonic()
        if (left_out := sheet.left_out()) is not None:
            with self.judging.news:
                self._left_out.append(left_out)
                self.judging.news.notify_all()
        else:
            self.judging.submit(sheet.group.place, sheet.question, sheet.rollouts())
