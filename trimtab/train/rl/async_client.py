"""The client of asynchronous rollout workers: groups go out to their processes and come back finished.

Workers in the policy's processes generate while they are asked what they have. Workers in their own processes generate
all the time, also while the policy learns; each of them may be lost, or hang. What went out is remembered until it
comes back: when an engine is lost or roles are rebuilt, the new ones get the same groups again. What the others
returned is not lost with one that is gone. No wait is silent: where nothing has been done for too long, the watchdog
prints what every sample waits for, and ends the run.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.distributed.launcher import EngineLost, Group, PendingCall, Unanswered
from trimtab.errors import OutOfMemory, RunFailed
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.micro_batch_limit import InsufficientMemory
from trimtab.train.rl.rollout_client import RolloutClient, serializing_prompts
from trimtab.train.rl.rollout_files import ReportedSpan
from trimtab.train.rl.rollout_worker import (
    Admission,
    Collected,
    FailedGroup,
    FinishedGroup,
    InFlightGroup,
    Wait,
    rollout_too_large,
)

MOST_ROWS = 40  # of the watchdog's table
STORE = "train"
ALONE, TOGETHER = 1.0, 0.2  # seconds between two calls of one process, and of several
LATE = 2.0  # seconds after which a result that should be there is not waited for
PATIENCE = 10.0  # seconds within which a worker that may hang says what it holds


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
        found = sorted(waits(), key=lambda wait: (-wait.seconds, wait.place, wait.sample))
        print(f"{'prompt':>8}{'answer':>8}{'tokens':>8}{'seconds':>9}  waits for")
        for wait in found[:MOST_ROWS]:
            print(f"{wait.place + 1:>8}{wait.sample + 1:>8}{wait.tokens:>8}{wait.seconds:>9.1f}  {wait.what}")
        if len(found) > MOST_ROWS:
            print(f"and {len(found) - MOST_ROWS} more")
        raise RolloutStalled(
            f"no token, no reward and no step for {self.seconds:g} s (--async_timeout); {len(found)} answers are under "
            "way, and the table above says what they wait for"
        )


@dataclass
class PolledGroups:
    """What all workers have done since they were asked last."""

    seconds: list[float]  # in which each engine was at work
    finished: list[FinishedGroup] = field(default_factory=list)
    failed: list[FailedGroup] = field(default_factory=list)
    drawn: int = 0
    read_again: int = 0
    problem: RewardFailed | InsufficientMemory | None = None
    stopped: bool = False  # because the run is to stop

    @property
    def places(self) -> list[int]:
        """Of the groups that no worker holds any more."""
        return [*(group.place for group in self.finished), *(group.prompt for group in self.failed)]

    def add(self, part: int, found: Collected | RewardFailed | InsufficientMemory | None) -> None:
        if isinstance(found, Collected):
            self.finished += found.finished
            self.failed += found.failed
            self.drawn += found.drawn
            self.read_again += found.read_again
            self.seconds[part] += found.seconds
        elif found is None:
            self.stopped = True
        else:
            self.problem = self.problem or found


class AsyncClient:
    def __init__(self, client: RolloutClient, sampling: SamplingParams, watchdog: Watchdog, *, remote: bool):
        """`remote`: the workers are in their own processes."""
        self.client, self.sampling, self.watchdog, self.remote = client, sampling, watchdog, remote
        self.generating = False  # now or, in the policy's processes, as soon as they are asked what they have
        self.held: dict[int, InFlightGroup] = {}  # by place, as they went out
        self._process: dict[int, int] = {}  # which has it
        # Of workers in their own processes: calls that not all have answered, and what has come of them.
        self._pausing: PendingCall | None = None
        self._collecting: PendingCall | None = None
        self._heard: set[int] = set()  # whose part of it was taken
        self._news = self._no_news()
        self._replaced = False  # some know nothing of what they were given

    @property
    def workers(self) -> Group:
        return self.client.rollouts

    # ---- groups out and back

    def admit(self, groups: Sequence[InFlightGroup]) -> None:
        """Each goes to the process that has the fewest."""
        load = Counter(self._process.values())
        for group in groups:
            process = min(range(self.workers.size), key=lambda rank: (load[rank], rank))
            load[process] += 1
            self.held[group.place], self._process[group.place] = group, process
        try:
            self._admit(groups)
        except EngineLost as lost:
            self._replace_engine(lost)

    def _admit(self, groups: Iterable[InFlightGroup]) -> None:
        shares: list[list[InFlightGroup]] = [[] for _ in range(self.workers.size)]
        for group in groups:
            shares[self._process[group.place]].append(group)
        if any(shares):
            asked = [self.client.prompt_batch([(g.row, g.seed) for g in share], STORE) for share in shares]
            parts = [Admission(share, prompt_batch) for share, prompt_batch in zip(shares, asked)]
            with serializing_prompts():
                self._call("admit", parts, sampling=self.sampling)

    def collect(self) -> PolledGroups:
        """What has come of them."""
        news = self._collect_remote() if self.remote else self._collect_local()
        for place in news.places:
            del self.held[place], self._process[place]
        return news

    def _collect_local(self) -> PolledGroups:
        """They generate meanwhile. One process returns as soon as it has a group; of several none does, because it
        would only wait for the others."""
        news, alone = self._no_news(), self.workers.size == 1
        try:
            found = self.workers.call("collect", seconds=ALONE if alone else TOGETHER, at_once=alone)
        except OutOfMemory as shortage:  # one of several processes has called off what all were doing
            self.workers.reinit_process_group()
            news.problem = rollout_too_large(shortage)
            return news
        for part, own in enumerate(self.workers.one_per_part(found)):
            news.add(part, own)
        return news

    def _collect_remote(self) -> PolledGroups:
        if self._collecting is None:
            self._collecting = self.workers.start("collect", seconds=TOGETHER, at_once=True)
            self._heard = set()
        if lost := self._hear(self._collecting, TOGETHER + LATE):
            self._replace_engine(lost)
        news, self._news = self._news, self._no_news()
        return news

    def _hear(self, collecting: PendingCall, seconds: float) -> EngineLost | None:
        found = collecting.poll(seconds)
        for part, own in enumerate(found):
            if part not in self._heard and not isinstance(own, Unanswered | EngineLost):
                self._news.add(part, own)
                self._heard.add(part)
        if not _missing(found):
            self._collecting = None
        return _lost(found)

    def _no_news(self) -> PolledGroups:
        return PolledGroups([0.0] * self.workers.size)

    # ---- pausing

    def pause(self, *, drained: bool = False) -> bool:
        """Whether no worker generates by now. `drained`: those in their own processes first finish the samples that
        they have begun, which takes a while."""
        if not self.generating:
            return True
        if self.remote:
            if self._pausing is None:
                self._pausing = self.workers.start("pause", drained=drained, seconds=TOGETHER)
            found = self._pausing.poll(TOGETHER + LATE)
            if _missing(found):
                return False
            self._pausing = None
            if not _free(found):
                return False
            self.generating = False
            if lost := _lost(found):
                self._replace_engine(lost)
        else:
            self.workers.call("pause")
            self.generating = False
        return True

    def resume(self) -> None:
        while not self.generating:
            try:
                if self._replaced:
                    known = {group.place for found in self._call("unfinished") for group in found}
                    known |= set(self._news.places)
                    self._admit([group for place, group in self.held.items() if place not in known])
                    self._replaced = False
                self.generating = True
                if self.remote:
                    self._call("resume")
            except EngineLost as lost:
                self._replace_engine(lost)

    # ---- what they hold

    def unfinished(self) -> list[InFlightGroup]:
        """Everything that went out and has not come back, as far as it is generated."""
        found: list[Any] = []
        try:
            if not self.remote:
                self.pause()
            found = self._answered("unfinished", PATIENCE)
        except (RunFailed, OutOfMemory) as error:
            if self.remote:
                raise
            print(f"answers under way begin anew on resume, since who writes them does not answer: {error}", flush=True)
        if any(own is None for own in found):
            print("an engine does not say what it has written: its answers begin anew on resume", flush=True)
        self.held |= {group.place: group for own in found for group in own or [] if group.place in self.held}
        return [self.held[place] for place in sorted(self.held)]

    def waits(self) -> list[Wait]:
        waits: list[Wait] = []
        for part, own in enumerate(self._answered("waits", LATE)):
            if own is None:
                groups = [group for place, group in self.held.items() if self._process[place] == part]
                own = [Wait(group.place, 0, "an engine that does not answer", 0, 0.0) for group in groups]
            waits += own
        return waits

    def spans(self) -> dict[int, list[ReportedSpan]]:
        """What each process has generated and scored when, since the last time."""
        return {part: own for part, own in enumerate(self._answered("spans", LATE)) if own is not None}

    # ---- new workers

    def rebuilt(self) -> None:
        """Roles were rebuilt: workers in the policy's processes get everything again, as it was when it went out or was
        last saved."""
        if not self.remote:
            self.generating = False
            groups, self.held, self._process = list(self.held.values()), {}, {}
            self.admit(groups)

    def engine_replaced(self) -> None:
        """While all others pause. No earlier call is asked again: it would report the same loss, and a pause that is
        over."""
        assert self.remote, "an engine in the policy's process is lost with it"
        self._replaced, self._pausing = True, None
        self.watchdog.moved()
        while self._collecting is not None:
            self._hear(self._collecting, LATE)
            self.watchdog.check(self.waits)

    def _replace_engine(self, lost: EngineLost) -> None:
        was_generating = self.generating
        if was_generating:
            while not _free(self._found("pause", seconds=TOGETHER)):
                self.watchdog.check(self.waits)
            self.generating = False
        self.client.replace_engine(lost)  # which calls `engine_replaced`
        if was_generating:
            self.resume()

    # ---- calls

    def _call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        """The results of all. EngineLost: one is gone, and the others have answered."""
        if not self.remote:
            return self.workers.call(method, parts, **shared)
        found = self._found(method, parts, **shared)
        if lost := _lost(found):
            raise lost
        return found

    def _found(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        call = self.workers.start(method, parts, **shared)
        while _missing(found := call.poll(LATE)):
            self.watchdog.check(self.waits)
        return found

    def _answered(self, method: str, seconds: float) -> list[Any]:
        """One result a part; None for a worker in its own process that has not answered in time."""
        if not self.remote:
            return self.workers.one_per_part(self.workers.call(method))
        found = self.workers.start(method).poll(seconds)
        return [None if isinstance(own, Unanswered | EngineLost) else own for own in found]


def _missing(found: Sequence[Any]) -> bool:
    return any(isinstance(own, Unanswered) for own in found)


def _free(found: Sequence[Any]) -> bool:
    """Whether all that are left have paused."""
    return all(own for own in found if not isinstance(own, EngineLost))


def _lost(found: Sequence[Any]) -> EngineLost | None:
    return next((own for own in found if isinstance(own, EngineLost)), None)
