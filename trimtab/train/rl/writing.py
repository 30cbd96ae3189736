"""Groups of answers that outlive an update, in one process that writes them.

They are written for a while. To pause, those that have not ended are set down as drafts; later they are read again by
the weights as they are then, and go on. A group whose answers have all ended is judged (judging.py) and handed over.

Of a policy that is split over processes, all of them write and pause together, if there is nothing to write for some.
Those of a tensor group have the same groups, write the same answers and go on or stop together: the first of them
judges, and decides.

Another thread than the one that writes may admit, take what was handed over, and ask (writing_beside.py). Neither waits
for the other: each of their steps on what they share is one that Python does not interrupt.
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
from trimtab.train.rl.spans import WRITING

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

    def under_way(self, newer: list[Draft]) -> UnderWay:
        """`newer`: what its open drafts have become."""
        drafts = list(self.drafts)
        for draft in newer:
            known = drafts[draft.sample]
            if known.finish is None and len(draft.tokens) > len(known.tokens):
                drafts[draft.sample] = draft
        return replace(self.group, drafts=drafts if any(len(draft.tokens) for draft in drafts) else [])

    def rollouts(self) -> list[Rollout]:
        (prompt,) = self.question.ids
        return [
            Rollout(0, draft.sample, prompt, draft.tokens, draft.log_probs, draft.finish, versions=draft.versions)
            for draft in self.drafts
            if draft.finish is not None
        ]


class Writing:
    def __init__(
        self,
        engine: Engine,
        judging: Judging,
        stopped: Callable[[], bool],
        tensor: Peers,
    ):
        self.engine, self.judging, self.stopped, self.tensor = engine, judging, stopped, tensor
        self.sampling: Sampling | None = None
        self._sheets: dict[int, Sheet] = {}  # by place
        self._next: deque[Sheet] = deque()  # not in the engine, the oldest first
        self._session: Session | None = None
        self._asked: dict[int, Sheet] = {}  # by the session's numbers
        # Sums since the beginning, and what of them has been told.
        self._taken = self._drawn = self._read_again = 0
        self._seconds = 0.0
        self._told = (0, 0, 0.0)

    # ---- what the loop asks

    def admit(self, admission: Admission, sampling: Sampling) -> None:
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
                    self.judging.news.wait_for(lambda: self.judging.ready, LOOK_EVERY)
        return self.handed_over()

    def _enough(self, deadline: float | None, at_once: bool) -> bool:
        if not self.tensor.leads:
            return self.stopped()
        late = deadline is not None and time.monotonic() >= deadline
        ready = self.judging.ready and (at_once or not self.busy)
        return late or ready or not self._sheets or self.stopped()

    def handed_over(self) -> Collected | None:
        written = self.judging.take()
        for found in written:
            del self._sheets[found.place]
        if self.stopped() and not written:
            return None
        sums, (drawn, read_again, seconds) = (self._drawn, self._read_again, self._seconds), self._told
        self._told = sums
        return Collected(written, sums[0] - drawn, sums[1] - read_again, sums[2] - seconds)

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """Set everything down at once: the engine is free for others until the next `collect`."""
        if (session := self._session) is not None:
            session.abort()
            while session.busy:
                for rollout in session.advance():
                    self._take(rollout)
            self._close(session)
            self.engine.rest()
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
        newer = {} if session is None else session.drafts()
        so_far = {id(sheet): newer.get(number, []) for number, sheet in asked.items()}
        return [sheet.under_way(so_far.get(id(sheet), [])) for sheet in list(self._sheets.values())]

    def waits(self) -> list[Wait]:
        now, session, later = time.monotonic(), self._session, list(self._next)
        asked = {id(sheet): number for number, sheet in list(self._asked.items())}
        lengths = {} if session is None else session.at_work()
        waits: list[Wait] = []
        for sheet in list(self._sheets.values()):
            for draft in sheet.open or sheet.drafts:
                tokens = lengths.get((asked.get(id(sheet), -1), draft.sample), len(draft.tokens))
                if draft.finish is not None:
                    what = "its reward"
                elif sheet in later:
                    what = "a place in the engine"
                else:
                    what = "its next token" if tokens > len(draft.tokens) else "its first token from the engine"
                waits.append(Wait(sheet.group.place, draft.sample, what, tokens, now - sheet.since))
        return waits

    # ---- the engine

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to write."""
        return bool(self._next) or (self._session is not None and self._session.busy)

    def advance(self, *, begin: bool = True) -> None:
        """Write for a moment. `begin`: also what has not begun."""
        began = time.monotonic()
        with self.judging.spans.during(WRITING):
            session = self._opened()
            while begin and self._next:
                self._begin(session, self._next.popleft())
            if session.busy:
                for rollout in session.advance():
                    self._take(rollout)
        known = sum(len(draft.tokens) for sheet in self._asked.values() for draft in sheet.open)
        self._drawn = self._taken + sum(session.at_work().values()) - known
        self._seconds += time.monotonic() - began

    def withdraw(self) -> None:
        """Groups of which the engine has written nothing since it got them have not begun: it gives them back."""
        if (session := self._session) is None:
            return
        lengths = session.at_work()
        waiting = [
            number
            for number, sheet in self._asked.items()
            if sheet.open and all(lengths.get((number, draft.sample)) == len(draft.tokens) for draft in sheet.open)
        ]
        if waiting:
            session.abort(waiting)
            for rollout in session.advance():
                self._take(rollout)
            self._next.extendleft(reversed([self._asked.pop(number) for number in waiting]))

    @property
    def begun(self) -> bool:
        """Whether the engine is in the middle of answers."""
        return self._session is not None and self._session.busy

    def abandon(self) -> None:
        """After the engine has failed: what it has said so far is kept."""
        if (session := self._session) is None:
            return
        for number, drafts in session.drafts().items():
            for draft in drafts:
                self._put(self._asked[number], draft)
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
        fresh = not any(len(draft.tokens) for draft in sheet.drafts)
        self._asked[session.add(ids, seed=seed, drafts=None if fresh else sheet.open)] = sheet
        self._read_again += sum(len(draft.tokens) for draft in sheet.open)

    def _take(self, rollout: Rollout) -> None:
        sheet = self._asked[rollout.prompt]
        self._put(sheet, Draft.of(rollout))
        if not sheet.open:
            self._judge(sheet)

    def _put(self, sheet: Sheet, draft: Draft) -> None:
        self._taken += len(draft.tokens) - len(sheet.drafts[draft.sample].tokens)
        sheet.drafts[draft.sample] = draft

    def _judge(self, sheet: Sheet) -> None:
        sheet.since = time.monotonic()
        self.judging.submit(sheet.group.place, sheet.question, sheet.rollouts())
