"""Those who write, as the loop sees them: groups go out to their processes, and come back whole.

What went out is remembered until it comes back. So when an engine is lost, or everything is built anew, whoever takes
its place is given the same groups again.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.distributed.launcher import Group
from trimtab.errors import OutOfMemory, RunFailed
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.pass_limit import NoRoom
from trimtab.train.rl import rollouts
from trimtab.train.rl.answers import Admission, Collected, LeftOut, UnderWay, Wait, Written
from trimtab.train.rl.asking import Asking, travelling
from trimtab.train.rl.spans import Told

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


class Writers:
    """Engines where the policy is: they write while they are asked what they have."""

    apart = False  # they write while the trainer learns (writers_apart.py)

    def __init__(self, asking: Asking, sampling: SamplingParams):
        self.asking, self.sampling = asking, sampling
        self.writing = False  # now, or as soon as they are asked what they have
        self.held: dict[int, UnderWay] = {}  # by place, as they were given out
        self._process: dict[int, int] = {}  # which has it

    @property
    def group(self) -> Group:
        return self.asking.rollouts

    # ---- to and fro

    def admit(self, groups: Sequence[UnderWay]) -> None:
        """Each goes to the process that has the fewest."""
        load = Counter(self._process.values())
        for group in groups:
            process = min(range(self.group.size), key=lambda rank: (load[rank], rank))
            load[process] += 1
            self.held[group.place], self._process[group.place] = group, process
        self._admit(groups)

    def _admit(self, groups: Iterable[UnderWay]) -> None:
        shares: list[list[UnderWay]] = [[] for _ in range(self.group.size)]
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
            news.problem = rollouts.no_room(shortage)
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

    def unfinished(self) -> list[UnderWay]:
        """Everything that went out and has not come back, as far as it is written."""
        told: list[list[UnderWay]] = []
        try:
            self.pause()
            told = self.group.first_of_each_part(self.group.call("unfinished"))
        except (RunFailed, OutOfMemory) as error:
            print(f"answers under way begin anew on resume, since who writes them does not answer: {error}", flush=True)
        return self._noted({group.place: group for part in told for group in part})

    def _noted(self, found: dict[int, UnderWay]) -> list[UnderWay]:
        self.held |= {place: group for place, group in found.items() if place in self.held}
        return [self.held[place] for place in sorted(self.held)]

    def waits(self) -> list[Wait]:
        return [wait for part in self.group.first_of_each_part(self.group.call("waits")) for wait in part]

    def spans(self) -> dict[int, list[Told]]:
        """What each process has written and judged when, since the last time."""
        return dict(enumerate(self.group.first_of_each_part(self.group.call("spans"))))

    # ---- those who write are others

    def built_anew(self) -> None:
        """All of them: they are given everything again, as it was when it went out or was last saved."""
        self.writing = False
        groups, self.held, self._process = list(self.held.values()), {}, {}
        self.admit(groups)

    def engine_replaced(self) -> None:
        raise AssertionError("they are where the policy is, and are lost with it")
