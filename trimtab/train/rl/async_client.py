"""The client of asynchronous rollout workers: it sends groups to their processes and collects finished ones.

Workers in the policy's processes generate only during `collect`. Workers in their own processes generate all the time,
also while the policy trains; each of them may die or hang. The client keeps every group until it comes back: when an
engine is lost or roles are rebuilt, the new workers get the same groups again, and results of the other workers are
kept. Every wait is bounded: without progress for --async_timeout seconds, the watchdog prints what each sample waits
for and ends the run.
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
from trimtab.train.update import InsufficientMemory

MOST_ROWS = 40  # of the watchdog's table
STORE = "train"
ALONE, TOGETHER = 1.0, 0.2  # seconds between two calls of one process, and of several
LATE = 2.0  # seconds to wait for a result that is already due
PATIENCE = 10.0  # seconds to wait for the unfinished groups of a worker that may hang


class RolloutStalled(RunFailed):
    """No token, no reward and no step for --async_timeout seconds. The run's state is intact and can be saved."""


class Watchdog:
    """Ends the run with a table of all waiting samples when nothing has progressed for too long."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.moved()

    def moved(self) -> None:
        """Reset the timer: there was progress."""
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
    """Results of all workers since the last `collect`."""

    seconds: list[float]  # busy time of each engine
    finished: list[FinishedGroup] = field(default_factory=list)
    failed: list[FailedGroup] = field(default_factory=list)
    drawn: int = 0
    read_again: int = 0
    problem: RewardFailed | InsufficientMemory | None = None
    stopped: bool = False  # a worker has received a stop signal

    @property
    def places(self) -> list[int]:
        """Places of the groups that no worker holds any more."""
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
    """Admits groups to asynchronous workers, collects results, pauses and resumes them, and replaces lost ones."""

    def __init__(self, client: RolloutClient, sampling: SamplingParams, watchdog: Watchdog, *, remote: bool):
        """`remote`: the workers are in their own processes."""
        self.client, self.sampling, self.watchdog, self.remote = client, sampling, watchdog, remote
        self.generating = False  # now or, in the policy's processes, at the next `collect`
        self.held: dict[int, InFlightGroup] = {}  # by place, as last sent or saved
        self._process: dict[int, int] = {}  # place -> rank of its worker
        # Remote workers only: calls without all results, and the results so far.
        self._pausing: PendingCall | None = None
        self._collecting: PendingCall | None = None
        self._received: set[int] = set()  # parts whose result is in self._polled
        self._polled = self._nothing_polled()
        self._replaced = False  # new workers have not received their groups yet

    @property
    def workers(self) -> Group:
        return self.client.rollouts

    # ---- groups out and back

    def admit(self, groups: Sequence[InFlightGroup]) -> None:
        """Send each group to the process that has the fewest."""
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
        """Finished and failed groups since the last call."""
        polled = self._collect_remote() if self.remote else self._collect_local()
        for place in polled.places:
            del self.held[place], self._process[place]
        return polled

    def _collect_local(self) -> PolledGroups:
        """Let the workers generate and collect. A single process returns as soon as it has a group; several return
        after a fixed time, since each would only wait for the others."""
        polled, alone = self._nothing_polled(), self.workers.size == 1
        try:
            found = self.workers.call("collect", seconds=ALONE if alone else TOGETHER, at_once=alone)
        except OutOfMemory as shortage:  # one of several processes has aborted the collectives of all
            self.workers.reinit_process_group()
            polled.problem = rollout_too_large(shortage)
            return polled
        for part, own in enumerate(self.workers.one_per_part(found)):
            polled.add(part, own)
        return polled

    def _collect_remote(self) -> PolledGroups:
        if self._collecting is None:
            self._collecting = self.workers.start("collect", seconds=TOGETHER, at_once=True)
            self._received = set()
        if lost := self._receive(self._collecting, TOGETHER + LATE):
            self._replace_engine(lost)
        polled, self._polled = self._polled, self._nothing_polled()
        return polled

    def _receive(self, collecting: PendingCall, seconds: float) -> EngineLost | None:
        found = collecting.poll(seconds)
        for part, own in enumerate(found):
            if part not in self._received and not isinstance(own, Unanswered | EngineLost):
                self._polled.add(part, own)
                self._received.add(part)
        if not _missing(found):
            self._collecting = None
        return _lost(found)

    def _nothing_polled(self) -> PolledGroups:
        return PolledGroups([0.0] * self.workers.size)

    # ---- pausing

    def pause(self, *, drained: bool = False) -> bool:
        """Ask the workers to pause; True once none generates. `drained`: remote workers first finish the samples they
        have begun."""
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
        """Let the workers generate; new ones first get the groups that they lack."""
        while not self.generating:
            try:
                if self._replaced:
                    known = {group.place for found in self._call("unfinished") for group in found}
                    known |= set(self._polled.places)
                    self._admit([group for place, group in self.held.items() if place not in known])
                    self._replaced = False
                self.generating = True
                if self.remote:
                    self._call("resume")
            except EngineLost as lost:
                self._replace_engine(lost)

    # ---- groups in flight

    def unfinished(self) -> list[InFlightGroup]:
        """All groups in flight, with the partial trajectories generated so far."""
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
        """Time spans of generation and scoring of each process since the last call."""
        return {part: own for part, own in enumerate(self._answered("spans", LATE)) if own is not None}

    # ---- new workers

    def rebuilt(self) -> None:
        """After roles were rebuilt: send all groups again to workers in the policy's processes, as last sent or
        saved."""
        if not self.remote:
            self.generating = False
            groups, self.held, self._process = list(self.held.values()), {}, {}
            self.admit(groups)

    def engine_replaced(self) -> None:
        """After an engine was replaced, while all others pause. Pending calls are dropped: they would report the same
        loss again, and a pause that is over."""
        assert self.remote, "an engine in the policy's process is lost with it"
        self._replaced, self._pausing = True, None
        self.watchdog.moved()
        while self._collecting is not None:
            self._receive(self._collecting, LATE)
            self.watchdog.check(self.waits)

    def _replace_engine(self, lost: EngineLost) -> None:
        was_generating = self.generating
        if was_generating:
            while not _free(self._wait_for_all("pause", seconds=TOGETHER)):
                self.watchdog.check(self.waits)
            self.generating = False
        self.client.replace_engine(lost)  # which calls `engine_replaced`
        if was_generating:
            self.resume()

    # ---- calls

    def _call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        """Call a method of all workers. EngineLost: one is gone, after the others have answered."""
        if not self.remote:
            return self.workers.call(method, parts, **shared)
        found = self._wait_for_all(method, parts, **shared)
        if lost := _lost(found):
            raise lost
        return found

    def _wait_for_all(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
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
    """Whether all remaining workers have paused."""
    return all(own for own in found if not isinstance(own, EngineLost))


def _lost(found: Sequence[Any]) -> EngineLost | None:
    return next((own for own in found if isinstance(own, EngineLost)), None)
