"""Nothing hangs in silence: who waits for what is told when nothing has been done for too long."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.distributed.launcher import EngineLost, Group, PendingCall, Unanswered
from trimtab.errors import OutOfMemory, RunFailed
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.micro_batch_limit import NoRoom
from trimtab.train.rl.async_groups import Admission, Collected, InFlightGroup, LeftOut, Wait, Written
from trimtab.train.rl.rollout_client import RolloutClient, travelling
from trimtab.train.rl.rollout_files import Told
from trimtab.train.rl.rollout_worker import rollout_too_large

MOST_ROWS = 40  # of the table


class RolloutStalled(RunFailed):
    """No token, no reward and no step for --async_timeout seconds. What the run holds is whole and can be saved."""


class Watchdog:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self.moved()

    def moved(self) -> None:
        """Something was done."""
        self._last = time.monotonic()

    def check(self, waits: Callable[[], Sequence[Wait]]) -> None:
        if time.monotonic() - self._last < self.seconds:
            return
        found = waits()
        print(*table(found), sep="\n", flush=True)
        raise RolloutStalled(
            f"no token, no reward and no step for {self.seconds:g} s (--async_timeout); {len(found)} answers are under "
            "way, and the table above says what they wait for"
        )


def table(waits: Sequence[Wait]) -> list[str]:
    """Who has waited longest comes first."""
    lines = [f"{'prompt':>8}{'answer':>8}{'tokens':>8}{'seconds':>9}  waits for"]
    found = sorted(waits, key=lambda wait: (-wait.seconds, wait.place, wait.sample))
    lines += [f"{w.place + 1:>8}{w.sample + 1:>8}{w.tokens:>8}{w.seconds:>9.1f}  {w.what}" for w in found[:MOST_ROWS]]
    return lines + ([f"and {len(found) - MOST_ROWS} more"] if len(found) > MOST_ROWS else [])


# ---- engines that share the policy's processes


STORE = "train"
ALONE, TOGETHER = 1.0, 0.2  # seconds between two looks at one process, and at several


@dataclass
class News:
    """What all processes have done since they were asked last."""

    seconds: list[float]  # in which each of them was at work
    written: list[Written] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    drawn: int = 0
    read_again: int = 0
    problem: RewardFailed | NoRoom | None = None
    stopped: bool = False  # told to

    def places(self) -> list[int]:
        """Of the groups that are nobody's any more."""
        return [*(found.place for found in self.written), *(found.place for found in self.left_out)]

    def add(self, part: int, told: Collected | RewardFailed | NoRoom | None) -> None:
        if isinstance(told, Collected):
            self.written += told.written
            self.left_out += told.left_out
            self.drawn += told.drawn
            self.read_again += told.read_again
            self.seconds[part] += told.seconds
        elif told is None:
            self.stopped = True
        else:
            self.problem = self.problem or told


class AsyncClient:
    """Engines where the policy is: they write while they are asked what they have."""

    apart = False  # they write while the trainer learns (writers_apart.py)

    def __init__(self, asking: RolloutClient, sampling: SamplingParams):
        self.asking, self.sampling = asking, sampling
        self.writing = False  # now, or as soon as they are asked what they have
        self.held: dict[int, InFlightGroup] = {}  # by place, as they were given out
        self._process: dict[int, int] = {}  # which has it

    @property
    def group(self) -> Group:
        return self.asking.rollouts

    # ---- to and fro

    def admit(self, groups: Sequence[InFlightGroup]) -> None:
        """Each goes to the process that has the fewest."""
        load = Counter(self._process.values())
        for group in groups:
            process = min(range(self.group.size), key=lambda rank: (load[rank], rank))
            load[process] += 1
            self.held[group.place], self._process[group.place] = group, process
        self._admit(groups)

    def _admit(self, groups: Iterable[InFlightGroup]) -> None:
        shares: list[list[InFlightGroup]] = [[] for _ in range(self.group.size)]
        for group in groups:
            shares[self._process[group.place]].append(group)
        if not any(shares):
            return
        asked = [self.asking.questions([(g.row, g.seed) for g in share], STORE) for share in shares]
        parts = [Admission(share, questions) for share, questions in zip(shares, asked)]
        with travelling():
            self._everybody("admit", parts, sampling=self.sampling)

    def _everybody(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        """What all say."""
        return self.group.call(method, parts, **shared)

    def collect(self) -> News:
        """What has come of it; they write meanwhile. One process comes back as soon as it has a group. Of several none
        does, because it would only wait for the others."""
        alone = self.group.size == 1
        news = self._no_news()
        try:
            told = self.group.call("collect", seconds=ALONE if alone else TOGETHER, at_once=alone)
        except OutOfMemory as shortage:  # one of several processes has called off what all were doing
            self.group.reinit_process_group()
            news.problem = rollout_too_large(shortage)
            return news
        for part, own in enumerate(self.group.first_of_each_part(told)):
            news.add(part, own)
        self._let_go(news)
        return news

    def _no_news(self) -> News:
        return News([0.0] * self.group.size)

    def _let_go(self, news: News) -> None:
        for place in news.places():
            del self.held[place], self._process[place]

    def pause(self, *, drained: bool = False) -> bool:
        """Whether nobody writes by now; those who were at it go on later. `drained`: engines of their own first end
        what they have begun, which takes a while."""
        if self.writing:
            self.group.call("pause")
            self.writing = False
        return True

    def go_on(self) -> None:
        self.writing = True

    def unfinished(self) -> list[InFlightGroup]:
        """Everything that went out and has not come back, as far as it is written."""
        told: list[list[InFlightGroup]] = []
        try:
            self.pause()
            told = self.group.first_of_each_part(self.group.call("unfinished"))
        except (RunFailed, OutOfMemory) as error:
            print(f"answers under way begin anew on resume, since who writes them does not answer: {error}", flush=True)
        return self._noted({group.place: group for part in told for group in part})

    def _noted(self, found: dict[int, InFlightGroup]) -> list[InFlightGroup]:
        self.held |= {place: group for place, group in found.items() if place in self.held}
        return [self.held[place] for place in sorted(self.held)]

    def waits(self) -> list[Wait]:
        return [wait for part in self.group.first_of_each_part(self.group.call("waits")) for wait in part]

    def spans(self) -> dict[int, list[Told]]:
        """What each process has written and judged when, since the last time."""
        return dict(enumerate(self.group.first_of_each_part(self.group.call("spans"))))

    # ---- those who write are others

    def rebuilt(self) -> None:
        """All of them: they are given everything again, as it was when it went out or was last saved."""
        self.writing = False
        groups, self.held, self._process = list(self.held.values()), {}, {}
        self.admit(groups)

    def engine_replaced(self) -> None:
        raise AssertionError("they are where the policy is, and are lost with it")


# ---- engines in processes of their own


LATE = 2.0  # seconds after which an answer that should be there is not waited for
PATIENCE = 10.0  # seconds within which one who may hang says what it holds


class RemoteAsyncClient(AsyncClient):
    apart = True

    def __init__(self, asking: RolloutClient, sampling: SamplingParams, watchdog: Watchdog):
        super().__init__(asking, sampling)
        self.watchdog = watchdog
        self._pausing: PendingCall | None = None
        self._collecting: PendingCall | None = None
        self._heard: set[int] = set()  # whose part of it was taken
        self._news = self._no_news()  # what was heard, and not handed on
        self._replaced = False  # some know nothing of what they were given

    # ---- to and fro

    def admit(self, groups: Sequence[InFlightGroup]) -> None:
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

    def unfinished(self) -> list[InFlightGroup]:
        found: dict[int, InFlightGroup] = {}
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

    def rebuilt(self) -> None:
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
        self.asking.replace_engine(lost)  # which tells of the new one
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
