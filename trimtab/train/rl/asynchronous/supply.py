"""Groups are written ahead, and outlive the updates between their first token and their use.

The ledger says who is admitted and who is trained, the writers write, reward models judge here, and what is whole
waits until its turn comes. Where the engine is with the policy, it writes while a batch is wanted and pauses while the
policy learns; engines of their own write all the time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trimtab.config.jobs import RLOptions
from trimtab.data.order import SampleOrder
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardResult
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.rl.answers import Answers, UnderWay
from trimtab.train.rl.asking import Asking
from trimtab.train.rl.asynchronous.groups import (
    fitting,
    partials_from_disk,
    partials_on_disk,
    whole_from_disk,
    whole_on_disk,
)
from trimtab.train.rl.asynchronous.ledger import Ledger
from trimtab.train.rl.asynchronous.watchdog import Watchdog
from trimtab.train.rl.asynchronous.writers import STORE, Writers
from trimtab.train.rl.asynchronous.writers_apart import WritersApart
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.failures import Failures
from trimtab.train.rl.recording import Sampled
from trimtab.train.rl.spans import Told
from trimtab.train.rl.supply import Supply, useful_groups


class Ahead(Supply):
    exact = False  # older weights have drawn some of it

    def __init__(
        self, options: RLOptions, order: SampleOrder, sampling: SamplingParams, asking: Asking, iterations: int
    ):
        """`order`: the prompts one by one, over all episodes; `iterations`: of the run."""
        self.options, self.order, self.sampling, self.asking = options, order, sampling, asking
        assert options.async_staleness is not None, "settled"
        self.ledger = Ledger(
            options.rollout_batch_size, options.async_queue_size, options.async_staleness, order.steps, iterations
        )
        self.watchdog = Watchdog(options.async_timeout)
        self.writers = Writers(asking, sampling)
        if options.engines_apart:
            self.writers = WritersApart(asking, sampling, self.watchdog)
        self.written: dict[int, Answers] = {}  # by place: whole, but not judged by the reward models
        self.judged: dict[int, Experience] = {}
        self.handed_out: dict[int, Experience] = {}  # the last batch, until it is trained
        self.last: dict[str, list[int]] | None = None  # what it has settled
        self.failures = Failures(options)  # since the last batch
        self.clock = Clock()

    # ---- the next batch

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        ledger = self.ledger
        if self.handed_out:  # and nothing was learnt from it, since roles had to be built anew
            self._put_back()
        ledger.begin(iteration)
        ledger.admitted = max(ledger.admitted, prompts_used)  # a synchronous run, that goes on from here as this one
        self.watchdog.moved()
        with self.clock.waiting():
            while (chosen := self._batch()) is None:
                self._admit()
                self.writers.go_on()
                if stop.signal or not self._collect() or stop.signal:
                    return None
        filtered, failed = list(ledger.filtered), list(ledger.failed)
        versions = ledger.take(chosen)
        self.last = {"trained": chosen, "versions": list(versions.values()), "filtered": filtered}
        self.last |= {"failed": failed} if self.options.plays else {}
        if self.writers.apart:
            self._admit()  # they write on while these are trained
        else:
            self.writers.pause()
        figures = self._figures([iteration - version for version in versions.values()])
        if self.options.dynamic_filtering:
            figures["filtered_groups"] = float(len(filtered))
        figures |= self.failures.figures()
        self.failures = Failures(self.options)
        prompts = len(chosen) + len(filtered) + len(failed)
        if not chosen:
            return None, prompts, figures
        self.handed_out = {place: self.judged.pop(place) for place in chosen}
        return Experience.joined(list(self.handed_out.values())), prompts, figures

    def _put_back(self) -> None:
        assert self.last is not None
        versions = dict(zip(self.last["trained"], self.last["versions"]))
        self.ledger.put_back(versions, self.last["filtered"], self.last.get("failed", []))
        self.judged |= self.handed_out
        self.handed_out, self.last = {}, None

    def _batch(self) -> list[int] | None:
        # Reward models may share devices with the engine: what it has written is judged when it pauses.
        if self.asking.reward_models is None or self.writers.apart:
            self._judge()
        chosen = self.ledger.batch()
        if chosen is None or not self.written:
            return chosen
        self.writers.pause()
        self._judge()
        return self.ledger.batch()

    def _admit(self) -> None:
        groups = []
        for place in self.ledger.admit():
            row, seed = self.order.step_samples(place)[0], request_seed(self.options.seed, place)
            groups.append(UnderWay(place, self.ledger.iteration, row, seed))
        self.writers.admit(groups)

    def _collect(self) -> bool:
        """Have them write for a while. False: told to stop."""
        news = self.writers.collect()
        for group in news.written:
            self.written[group.place] = group.answers
            self.ledger.finish(group.place)
        for left_out in news.left_out:
            self.ledger.fail(left_out.place)
        self.clock.add(news.seconds, news.read_again)
        if news.problem is not None:
            with self.asking.placed(STORE):
                raise news.problem
        if news.written or news.left_out or news.drawn:
            self.watchdog.moved()
        elif not news.stopped:
            self.watchdog.check(self.writers.waits)
        for left_out in news.left_out:
            where = self.asking.stores[STORE].place(self.order.step_samples(left_out.place)[0])
            self.failures.add([f"{left_out.words}; its prompt stands in {where}"], left_out.episodes)
        return not news.stopped

    def _judge(self) -> None:
        """Rewards for what is written; what teaches nothing makes room."""
        if not self.written:
            return
        parts = list(self.written.values())
        results = [RewardResult.joined(found) for found in zip(*(part.results for part in parts))]
        answers = Answers(Experience.joined([part.experience for part in parts]), results)
        experience = self.asking.judged(answers, STORE)
        useful = set(useful_groups(experience, self.options))
        for group, place in enumerate(self.written):
            if group in useful:
                self.judged[place] = experience.take(experience.samples_of([group]))
            else:
                self.ledger.filter(place)
        self.written = {}
        self.watchdog.moved()

    def _figures(self, ages: list[int]) -> dict[str, float]:
        found = {"age": sum(ages) / len(ages), "age_max": float(max(ages))} if ages else {}
        return found | {"under_way": float(len(self.ledger.versions)), **self.clock.figures(apart=self.writers.apart)}

    # ---- what outlives an update

    @contextmanager
    def paused(self) -> Iterator[None]:
        if not self.writers.writing:
            yield
            return
        drained = not self.options.partial_rollout
        self.watchdog.moved()
        with self.clock.waiting():
            while not self.writers.pause(drained=drained):
                drained = self._collect() and drained  # told to stop, nobody waits for answers to end
        yield
        self.writers.go_on()

    def trained(self) -> None:
        self.handed_out = {}

    def settled(self) -> dict[str, list[int]] | None:
        return self.last

    def spans(self) -> dict[int, list[Told]]:
        return self.writers.spans()

    def built_anew(self) -> None:
        self.writers.built_anew()

    def engine_replaced(self) -> None:
        self.writers.engine_replaced()

    def state(self, *, in_hand: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.handed_out and not in_hand:
            self._put_back()
        drafts, under_way = partials_on_disk(self.writers.unfinished())
        columns, whole = whole_on_disk(self.judged, self.written)
        state = {"ledger": self.ledger.state(), "bound": self.ledger.bound, "last": self.last}
        state |= {"failed_episodes": self.failures.episodes} if self.options.plays else {}
        return drafts | columns, {**state, "under_way": under_way, "whole": whole}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.ledger.restore(state["ledger"])
        if not self.ledger.is_in_time:
            raise UserError(
                f"--async_staleness {self.ledger.bound}: answers of the checkpoint would be older when they are "
                f"trained; give {state['bound']} and the --rollout_batch_size of before"
            )
        self.last = state["last"]
        self.failures.episodes = state.get("failed_episodes", 0)  # a run that they have ended may go on
        drafts = {name: column for name, column in tensors.items() if name.startswith("drafts/")}
        columns = {name: column for name, column in tensors.items() if name not in drafts}
        self.judged, self.written = whole_from_disk(columns, state["whole"])
        self.writers.admit([fitting(group, self.sampling) for group in partials_from_disk(drafts, state["under_way"])])


class Clock:
    """Where the time between two batches went."""

    def __init__(self) -> None:
        self._began: float | None = None  # when the first was wanted, or the last handed out
        self._reset()

    def _reset(self) -> None:
        self._wanted = 0.0  # seconds in which a batch was waited for
        self._busy: list[float] = []  # seconds of each engine
        self._read_again = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.monotonic()
        self._began = self._began or began
        yield
        self._wanted += time.monotonic() - began

    def add(self, busy: list[float], read_again: int) -> None:
        self._busy = [a + b for a, b in zip(self._busy, busy)] if self._busy else list(busy)
        self._read_again += read_again

    def figures(self, *, apart: bool) -> dict[str, float]:
        """Since the last batch. `apart`: the trainer has nothing to do while it waits; else it writes."""
        now, wanted, busy = time.monotonic(), self._wanted, self._busy or [0.0]
        assert self._began is not None, "it was waited for"
        whole = max(now - self._began, 1e-9)
        idle = wanted if apart else max(0.0, wanted - max(busy))
        found = {"waiting": idle / whole, "read_again": float(self._read_again)}
        if apart:
            found["engine_busy"] = sum(busy) / len(busy) / whole
        self._began = now
        self._reset()
        return found
