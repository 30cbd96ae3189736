"""Which groups are written, and which are trained next: numbers alone, no tokens.

Every prompt has a *place* in the order of the data. The weights have a *version*: the iterations done. B groups are a
batch, D batches may be under way ahead of the one that is wanted, and S bounds the age of what is trained.

    admitted     in the order of the data, while the groups that are neither trained nor left out, with those in hand,
                 are fewer than (1 + D) B; never more than the iterations that are left can train
    age          the iteration that trains a group less the version it was admitted with: at least that of each token
    batch t      the oldest B finished groups, as soon as for every d in t..t+S the groups left behind whose age would
                 be S in iteration d or before are at most the (d - t) B that will have been trained by then

Whoever is left behind can therefore still be trained in time, by waiting for the oldest: the age is never above S,
nothing that is finished is thrown away, and with S >= D nobody waits for ever. A group that is filtered, or whose
environment failed, frees its place at once, and the next prompt is admitted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any


@dataclass
class Ledger:
    batch_size: int  # B
    ahead: int  # D
    bound: int  # S
    places: int  # in all
    iterations: int  # that the run will have at most
    iteration: int = 0  # the one that is sampled or trained
    admitted: int = 0  # places, in their order
    versions: dict[int, int] = field(default_factory=dict)
    """Of every group that is admitted and neither filtered nor chosen, in the order of their places."""
    finished: set[int] = field(default_factory=set)  # those of them that can be trained
    filtered: list[int] = field(default_factory=list)  # since a batch was chosen
    failed: list[int] = field(default_factory=list)  # since then, too
    in_hand: bool = False  # whether this iteration's batch has been chosen

    def __post_init__(self) -> None:
        assert self.batch_size > 0 and 0 < self.ahead <= self.bound, "where nothing outlives an update, none is needed"

    def begin(self, iteration: int) -> None:
        """This one's batch is wanted next; all before it are trained."""
        assert iteration >= self.iteration
        self.in_hand = self.in_hand and iteration == self.iteration
        self.iteration = iteration

    # ---- who is written

    def admit(self) -> list[int]:
        """The places of the groups that are begun now."""
        batches = min(1 + self.ahead, self.iterations - self.iteration) - self.in_hand
        room = min(batches * self.batch_size - len(self.versions), self.places - self.admitted)
        found = list(range(self.admitted, self.admitted + max(room, 0)))
        self.versions |= dict.fromkeys(found, self.iteration)
        self.admitted += len(found)
        return found

    def finish(self, place: int) -> None:
        assert place in self.versions and place not in self.finished, "each place once"
        self.finished.add(place)

    def filter(self, place: int) -> None:
        """It is of no use."""
        del self.versions[place]
        self.finished.discard(place)
        self.filtered.append(place)

    def fail(self, place: int) -> None:
        """Its environment failed, and it cannot be trained."""
        assert place not in self.finished, "it was never whole"
        del self.versions[place]
        self.failed.append(place)

    # ---- who is trained

    @property
    def is_spent(self) -> bool:
        """Whether every place has been admitted."""
        return self.admitted >= self.places  # more, if there are fewer now than before a resume

    def batch(self) -> list[int] | None:
        """The places of the next batch: fewer than B only at the end of the data. None: it is not there yet."""
        assert not self.in_hand
        wanted = min(self.batch_size, len(self.versions)) if self.is_spent else self.batch_size
        if len(self.finished) < wanted:
            return None
        chosen = list(islice((place for place in self.versions if place in self.finished), wanted))
        return chosen if self.leaves_time(chosen) else None

    def leaves_time(self, chosen: Iterable[int]) -> bool:
        """Whether all others can be trained before they are too old, if these are trained now."""
        taken = set(chosen)
        last = Counter(version + self.bound for place, version in self.versions.items() if place not in taken)
        due = sum(count for iteration, count in last.items() if iteration < self.iteration)
        for later in range(self.bound + 1):
            due += last[self.iteration + later]
            if due > later * self.batch_size:
                return False
        return True

    @property
    def is_in_time(self) -> bool:
        """Whether everybody can still be trained within the bound: always so, unless another one is given on resume."""
        if min(self.versions.values(), default=self.iteration) + self.bound < self.iteration:
            return False
        return self.leaves_time([] if self.in_hand else islice(self.versions, self.batch_size))

    def take(self, chosen: Iterable[int]) -> dict[int, int]:
        """These are trained in this iteration; their versions."""
        self.in_hand = True
        self.filtered, self.failed = [], []
        self.finished.difference_update(chosen)
        return {place: self.versions.pop(place) for place in chosen}

    def put_back(self, versions: dict[int, int], filtered: list[int], failed: list[int]) -> None:
        """These were taken, and are not trained after all; `filtered`, `failed`: those that were before."""
        self.in_hand = False
        self.versions = dict(sorted((self.versions | versions).items()))
        self.finished.update(versions)
        self.filtered, self.failed = filtered + self.filtered, failed + self.failed

    # ---- in a checkpoint

    def state(self) -> dict[str, Any]:
        """Everything but the settings, as JSON has it."""
        return {
            "iteration": self.iteration,
            "admitted": self.admitted,
            "versions": list(map(list, self.versions.items())),
            "finished": sorted(self.finished),
            "filtered": list(self.filtered),
            "failed": list(self.failed),
            "in_hand": self.in_hand,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.iteration, self.admitted, self.in_hand = state["iteration"], state["admitted"], state["in_hand"]
        self.versions = {place: version for place, version in state["versions"]}
        self.finished, self.filtered = set(state["finished"]), list(state["filtered"])
        self.failed = list(state.get("failed", []))  # earlier versions had no environments
