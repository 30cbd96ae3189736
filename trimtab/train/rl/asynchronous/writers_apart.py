"""Those who write in processes of their own, also while the policy learns. Each of them may be lost, or hang.

What the others found is not lost with one that is gone: another takes its place, while all pause, and is given what
nobody has any more. Nobody is waited for in silence: who does not answer is told by the watchdog.
"""

from collections.abc import Sequence
from typing import Any

from trimtab.distributed.launcher import EngineLost, PendingCall, Unanswered
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.rl.answers import UnderWay, Wait
from trimtab.train.rl.asking import Asking
from trimtab.train.rl.asynchronous.watchdog import Watchdog
from trimtab.train.rl.asynchronous.writers import TOGETHER, News, Writers
from trimtab.train.rl.spans import Told

LATE = 2.0  # seconds after which an answer that should be there is not waited for
PATIENCE = 10.0  # seconds within which one who may hang says what it holds


class WritersApart(Writers):
    apart = True

    def __init__(self, asking: Asking, sampling: SamplingParams, watchdog: Watchdog):
        super().__init__(asking, sampling)
        self.watchdog = watchdog
        self._pausing: PendingCall | None = None
        self._collecting: PendingCall | None = None
        self._heard: set[int] = set()  # whose part of it was taken
        self._news = self._no_news()  # what was heard, and not handed on
        self._replaced = False  # some know nothing of what they were given

    # ---- to and fro

    def admit(self, groups: Sequence[UnderWay]) -> None:
        try:
            super().admit(groups)
        except EngineLost as lost:
            self._mend(lost)

    def collect(self) -> News:
        if self._collecting is None:
            self._collecting = self.group.start("collect", seconds=TOGETHER, at_once=True)
            self._heard = set()
        if lost := self._hear(self._collecting, TOGETHER + LATE):
            self._mend(lost)
        news, self._news = self._news, self._no_news()
        self._let_go(news)
        return news

    def _hear(self, collecting: PendingCall, seconds: float) -> EngineLost | None:
        found = collecting.found(seconds)
        for part, told in enumerate(found):
            if part not in self._heard and not isinstance(told, Unanswered | EngineLost):
                self._news.add(part, told)
                self._heard.add(part)
        if not _missing(found):
            self._collecting = None
        return _lost(found)

    def pause(self, *, drained: bool = False) -> bool:
        if not self.writing:
            return True
        if self._pausing is None:
            self._pausing = self.group.start("pause", drained=drained, seconds=TOGETHER)
        found = self._pausing.found(TOGETHER + LATE)
        if _missing(found):
            return False
        self._pausing = None
        if not _free(found):
            return False
        self.writing = False
        if lost := _lost(found):
            self._mend(lost)
        return True

    def go_on(self) -> None:
        while not self.writing:
            try:
                if self._replaced:
                    self._give_again()
                self.writing = True
                self._everybody("go_on")
            except EngineLost as lost:
                self._mend(lost)

    def unfinished(self) -> list[UnderWay]:
        found: dict[int, UnderWay] = {}
        for told in self.group.start("unfinished").found(PATIENCE):
            if isinstance(told, Unanswered | EngineLost):
                print("an engine does not say what it has written: its answers begin anew on resume", flush=True)
            else:
                found |= {group.place: group for group in told}
        return self._noted(found)

    def waits(self) -> list[Wait]:
        waits: list[Wait] = []
        for part, told in enumerate(self.group.start("waits").found(LATE)):
            if isinstance(told, Unanswered | EngineLost):
                own = [group for place, group in self.held.items() if self._process[place] == part]
                waits += [Wait(group.place, 0, "an engine that does not answer", 0, 0.0) for group in own]
            else:
                waits += told
        return waits

    def spans(self) -> dict[int, list[Told]]:
        found = enumerate(self.group.start("spans").found(LATE))
        return {part: told for part, told in found if not isinstance(told, Unanswered | EngineLost)}

    # ---- those who write are others

    def built_anew(self) -> None:
        """Only those who learn were: engines go on."""

    def engine_replaced(self) -> None:
        """All others have paused. Nothing that was asked before is asked for again: it would tell of the same loss, and
        of a pause that is over."""
        self._replaced, self._pausing = True, None
        self.watchdog.moved()
        while self._collecting is not None:
            self._hear(self._collecting, LATE)
            self.watchdog.check(self.waits)

    def _mend(self, lost: EngineLost) -> None:
        were_writing = self.writing
        if were_writing:
            while not _free(self._found("pause", seconds=TOGETHER)):
                self.watchdog.check(self.waits)
            self.writing = False
        self.asking.mend(lost)  # which tells of the new one
        if were_writing:
            self.go_on()

    def _give_again(self) -> None:
        known = {group.place for told in self._everybody("unfinished") for group in told}
        known |= set(self._news.places())
        self._admit([group for place, group in self.held.items() if place not in known])
        self._replaced = False

    # ---- calls

    def _everybody(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        """What all say. EngineLost: one is gone, and the others have said it."""
        found = self._found(method, parts, **shared)
        if lost := _lost(found):
            raise lost
        return found

    def _found(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        call = self.group.start(method, parts, **shared)
        while _missing(found := call.found(LATE)):
            self.watchdog.check(self.waits)
        return found


def _missing(found: Sequence[Any]) -> bool:
    return any(isinstance(told, Unanswered) for told in found)


def _free(found: Sequence[Any]) -> bool:
    """Whether all that are left have paused."""
    return all(told for told in found if not isinstance(told, EngineLost))


def _lost(found: Sequence[Any]) -> EngineLost | None:
    return next((told for told in found if isinstance(told, EngineLost)), None)
