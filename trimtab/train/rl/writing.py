"""Groups of answers that outlive an update, in one process that writes them.

They are written for a while. To pause, those that have not ended are set down as drafts; later they are read again by
the weights as they are then, and go on. A group whose answers have all ended is judged (judging.py) and handed over.

Of a policy that is split over processes, all of them write and pause together, if there is nothing to write for some.
Those of a tensor group have the same groups, write the same answers and go on or stop together: the first of them
judges, and decides.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from trimtab.distributed.peers import Peers
from trimtab.distributed.watch import pulse
from trimtab.rewards.requests import Questions
from trimtab.rollout.engine import Engine, Session
from trimtab.rollout.types import Draft, Rollout, Sampling
from trimtab.train.rl.answers import Admission, Collected, UnderWay, Wait
from trimtab.train.rl.judging import Judging

LOOK_EVERY = 0.05  # seconds after which a signal is noticed while rewards are waited for


class Sheet:
    """The answers to one prompt, from its admission until they are handed over."""

    def __init__(self, group: UnderWay, question: Questions, samples: int):
        self.group, self.question = group, question
        found = {draft.sample: draft for draft in group.drafts}
        self.drafts = [found.get(sample) or Draft.empty(sample) for sample in range(samples)]
        self.since = time.monotonic()  # when it was last handed on: to the engine, to the rewards

    @property
    def open(self) -> list[Draft]:
        """Those that have not ended."""
        return [draft for draft in self.drafts if draft.finish is None]

    @property
    def tokens(self) -> int:
        return sum(len(draft.ids) for draft in self.drafts)

    def under_way(self) -> UnderWay:
        return replace(self.group, drafts=list(self.drafts) if self.tokens else [])

    def rollouts(self) -> list[Rollout]:
        (prompt,) = self.question.ids
        return [
            Rollout(0, draft.sample, prompt, draft.ids, draft.log_probs, draft.finish, versions=draft.versions)
            for draft in self.drafts
            if draft.finish is not None
        ]


class Writing:
    def __init__(self, engine: Engine, judging: Judging, stopped: Callable[[], bool], tensor: Peers | None = None):
        self.engine, self.judging, self.stopped = engine, judging, stopped
        self.tensor = tensor or Peers()
        self.sampling: Sampling | None = None
        self._sheets: dict[int, Sheet] = {}  # by place
        self._next: deque[Sheet] = deque()  # not in the engine yet, the oldest first
        self._session: Session | None = None
        self._asked: dict[int, Sheet] = {}  # by the session's numbers
        self._drawn = self._read_again = 0
        self._seconds = 0.0

    # ---- what the loop asks

    def admit(self, admission: Admission, sampling: Sampling) -> None:
        assert self.sampling in (None, sampling), "all groups of a run are drawn alike"
        self.sampling = sampling
        for index, group in enumerate(admission.groups):
            assert group.place not in self._sheets, f"place {group.place} is under way already"
            sheet = Sheet(group, admission.questions.take(index), sampling.n)
            self._sheets[group.place] = sheet
            self._next.append(sheet)

    def collect(self, seconds: float | None = None) -> Collected | None:
        """Write until a group is whole and judged, or for so many seconds; what has been done since the last time.
        None: told to stop. At once if there is nothing to write and nothing to judge."""
        deadline = None if seconds is None else time.monotonic() + seconds
        session = self._opened()
        while not self.tensor.any(self._enough(deadline)):
            if self._next or session.busy:
                self.advance()
            elif self.tensor.leads:
                with pulse.waiting(), self.judging.news:  # a reward has a limit of its own
                    self.judging.news.wait_for(lambda: self.judging.ready, LOOK_EVERY)
        return self.handed_over()

    def _enough(self, deadline: float | None) -> bool:
        if not self.tensor.leads:
            return self.stopped()
        late = deadline is not None and time.monotonic() >= deadline
        return late or self.judging.ready or not self._sheets or self.stopped()

    def handed_over(self) -> Collected | None:
        written = self.judging.take()
        for found in written:
            del self._sheets[found.place]
        if self.stopped() and not written:
            return None
        done = Collected(written, self._drawn, self._read_again, len(written), self._seconds)
        self._drawn, self._read_again, self._seconds = 0, 0, 0.0
        return done

    def pause(self) -> None:
        """Set everything down; the engine is free for others."""
        session, self._session = self._session, None
        if session is None:
            return
        with session:
            session.abort()
            while session.busy:
                for rollout in session.advance():
                    self._take(rollout)
        self._asked.clear()
        self._next = deque(sheet for sheet in self._sheets.values() if sheet.open)
        self.engine.rest()

    def unfinished(self) -> list[UnderWay]:
        """Everything that was admitted and not handed over."""
        return [sheet.under_way() for sheet in self._sheets.values()]

    def waits(self) -> list[Wait]:
        now = time.monotonic()
        return [wait for sheet in self._sheets.values() for wait in self._waits_of(sheet, now)]

    def _waits_of(self, sheet: Sheet, now: float) -> list[Wait]:
        waiting = sheet.open or sheet.drafts
        what = "its reward" if not sheet.open else "the engine" if sheet in self._next else "its next token"
        return [Wait(sheet.group.place, d.sample, what, len(d.ids), now - sheet.since) for d in waiting]

    # ---- the engine

    def _opened(self) -> Session:
        if self._session is None:
            assert self.sampling is not None, "groups are admitted before they are written"
            self._session = self.engine.session(self.sampling)
        return self._session

    def advance(self) -> None:
        """Write for a moment."""
        began = time.monotonic()
        session = self._opened()
        while self._next:
            self._begin(session, self._next.popleft())
        if session.busy:
            for rollout in session.advance():
                self._take(rollout)
        self._seconds += time.monotonic() - began

    def _begin(self, session: Session, sheet: Sheet) -> None:
        sheet.since = time.monotonic()
        if not sheet.open:  # only its rewards are missing
            return self._judge(sheet)
        (ids,), (seed,) = sheet.question.ids, sheet.question.seeds
        drafts = sheet.open if sheet.tokens else None
        self._read_again += sum(len(draft.ids) for draft in sheet.open)
        self._asked[session.add(ids, seed=seed, drafts=drafts)] = sheet

    def _take(self, rollout: Rollout) -> None:
        sheet, draft = self._asked[rollout.prompt], Draft.of(rollout)
        self._drawn += len(draft.ids) - len(sheet.drafts[draft.sample].ids)
        sheet.drafts[draft.sample] = draft
        if not sheet.open:
            self._judge(sheet)

    def _judge(self, sheet: Sheet) -> None:
        sheet.since = time.monotonic()
        self.judging.submit(sheet.group.place, sheet.question, sheet.rollouts())
