"""The rules of asynchronous training, over many random runs: durations, filtering, stops, sizes."""

import heapq
import json
import random

import numpy as np
import pytest

from trimtab.train.rl.async_source import Ledger


class Simulated:
    """A run whose groups take random times, judged by what it has done and not by what its ledger says."""

    def __init__(self, ledger: Ledger, *, seed: int, train: float = 1.0, useful: float = 1.0, slots: int = 10**9):
        self.ledger, self.random, self.train, self.useful, self.slots = (
            ledger,
            random.Random(seed),
            train,
            useful,
            slots,
        )
        self.now, self.waited = 0.0, 0.0
        self.writing: list[tuple[float, int]] = []  # when each will have ended
        self.queued: list[int] = []
        self.admitted_at: dict[int, int] = {}
        self.lines: list[dict] = []  # one an iteration

    def admit(self) -> None:
        for place in self.ledger.admit():
            assert place not in self.admitted_at, "admitted once"
            self.admitted_at[place] = self.ledger.iteration
            self.queued.append(place)
        while self.queued and len(self.writing) < self.slots:
            heapq.heappush(self.writing, (self.now + self.random.lognormvariate(0.5, 1.0), self.queued.pop(0)))

    def end(self, place: int) -> None:
        self.ledger.finish(place)
        if self.random.random() > self.useful:
            self.ledger.filter(place)
        self.admit()

    def iterate(self) -> bool:
        """One iteration. False: there is nothing left."""
        ledger = self.ledger
        ledger.begin(len(self.lines))
        self.admit()
        while self.writing and self.writing[0][0] <= self.now:
            self.end(heapq.heappop(self.writing)[1])
        while (chosen := ledger.batch()) is None:
            assert self.writing, "nobody is written, and the batch is not there: it waits for ever"
            at, place = heapq.heappop(self.writing)
            self.waited += max(at - self.now, 0.0)
            self.now = max(at, self.now)
            self.end(place)
        filtered = list(ledger.filtered)
        ledger.take(chosen)
        self.lines.append({"trained": chosen, "filtered": filtered})
        self.admit()  # while it is trained others are written
        self.now += self.train
        return bool(chosen)

    def checkpoint(self) -> str:
        return json.dumps([self.ledger.state(), self.lines, sorted(self.admitted_at.items())])

    def killed(self, checkpoint: str) -> None:
        """Go on from there: whoever was unfinished is written again."""
        state, self.lines, admitted = json.loads(checkpoint)
        self.ledger.restore(state)
        self.admitted_at = dict(admitted)
        assert self.ledger.is_within_staleness_bound
        ended = set(state["finished"])
        self.writing, self.queued = [], [place for place, _ in state["versions"] if place not in ended]

    @property
    def ages(self) -> list[int]:
        return [t - self.admitted_at[place] for t, line in enumerate(self.lines) for place in line["trained"]]


def settled(run: Simulated) -> list[int]:
    return sorted(place for line in run.lines for place in [*line["trained"], *line["filtered"]])


@pytest.mark.parametrize("seed", range(150))
def test_each_place_is_trained_or_filtered_once_in_time_over_any_stops(seed: int):
    draw = random.Random(seed)
    size, ahead = draw.randint(1, 6), draw.randint(1, 4)
    bound, places = ahead + draw.randint(0, 4), draw.randint(1, 150)
    ledger = Ledger(size, ahead, bound, places, iterations=-(-places // size))
    run = Simulated(ledger, seed=seed, train=draw.choice([0.0, 1.0, 5.0]), useful=draw.choice([1.0, 0.7, 0.3, 0.0]))
    run.slots = draw.choice([1, 3, 10**9])
    saved = run.checkpoint()
    while run.iterate():
        if draw.random() < 0.3:
            saved = run.checkpoint()
        if draw.random() < 0.2:
            run.killed(saved)
    assert settled(run) == list(range(places))
    assert all(len(line["trained"]) == size for line in run.lines[:-2])
    assert max(run.ages, default=0) <= bound
    assert not ledger.versions and not ledger.finished


@pytest.mark.parametrize("seed", range(20))
def test_a_run_of_few_iterations_writes_nothing_that_it_does_not_train(seed: int):
    draw = random.Random(seed)
    size, ahead, iterations = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 6)
    ledger = Ledger(size, ahead, ahead + draw.randint(0, 2), 10**6, iterations)
    run = Simulated(ledger, seed=seed, useful=draw.choice([1.0, 0.5]))
    for _ in range(iterations):
        assert run.iterate()
    trained = sum(len(line["trained"]) for line in run.lines)
    assert trained == iterations * size == len(run.admitted_at) - sum(len(line["filtered"]) for line in run.lines)
    assert not ledger.versions


def test_no_more_are_under_way_than_the_depth_allows():
    ledger = Ledger(batch_size=4, ahead=2, bound=2, places=1000, iterations=250)
    assert ledger.admit() == list(range(12))
    assert ledger.admit() == []
    ledger.filter(3)
    assert ledger.admit() == [12], "a filtered group makes room at once"
    for place in (0, 1, 2, 12):
        ledger.finish(place)
    assert ledger.batch() == [0, 1, 2, 12]
    ledger.take([0, 1, 2, 12])
    assert ledger.admit() == [], "those in hand count until they are trained"
    ledger.begin(1)
    assert ledger.admit() == [13, 14, 15, 16]
    assert set(ledger.versions.values()) == {0, 1}


def test_a_batch_waits_for_those_that_would_be_too_old_and_for_nobody_else():
    ledger = Ledger(batch_size=2, ahead=1, bound=1, places=100, iterations=50)
    assert ledger.admit() == [0, 1, 2, 3]
    ledger.finish(2)
    ledger.finish(3)
    assert ledger.batch() == [2, 3], "0 and 1 can still be trained next"
    ledger.take([2, 3])
    ledger.begin(1)
    assert ledger.admit() == [4, 5]
    ledger.finish(4)
    ledger.finish(5)
    assert ledger.batch() is None, "0 and 1 would be trained at age 2"
    ledger.finish(0)
    ledger.finish(1)
    assert ledger.batch() == [0, 1]


def test_a_smaller_bound_on_resume_is_noticed():
    state = {"iteration": 3, "admitted": 4, "versions": [[2, 0], [3, 3]], "finished": [], "filtered": []}
    for bound, in_hand, fits in ((3, False, True), (3, True, False), (2, False, False), (4, True, True)):
        ledger = Ledger(batch_size=1, ahead=1, bound=bound, places=100, iterations=100)
        ledger.restore({**state, "in_hand": in_hand})
        assert ledger.is_within_staleness_bound is fits, (bound, in_hand)


@pytest.mark.parametrize(
    ("ahead", "bound", "waiting", "age", "oldest"), [(1, 1, 0.64, 1, 1), (1, 4, 0.38, 1, 4), (4, 4, 0.34, 3.9, 4)]
)
def test_depth_and_bound_buy_what_was_simulated_before(ahead, bound, waiting, age, oldest):
    """Batches of 16, 80 steps of 3 s, log-normal durations of 2.7 s on average: figures of an earlier simulation that
    shares no code with this one."""
    runs = [Simulated(Ledger(16, ahead, bound, 10**6, 10**5), seed=seed, train=3.0) for seed in range(5)]
    for run in runs:
        for _ in range(80):
            run.iterate()
    assert np.mean([run.waited / run.now for run in runs]) == pytest.approx(waiting, abs=0.04)
    assert np.mean([np.mean(run.ages) for run in runs]) == pytest.approx(age, abs=0.05)
    assert {max(run.ages) for run in runs} == {oldest}
