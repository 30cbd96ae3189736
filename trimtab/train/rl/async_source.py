"""The asynchronous rollout source: groups are generated while the policy trains and may span weight updates.

The ledger decides, without looking at tokens or rewards, which groups are admitted and which are trained next.

Every prompt has a *place* in the order of the data. The weights have a *version*: the iterations done. B groups are a
batch, D batches may be in flight ahead of the current one, and S bounds the staleness of trained groups.

    admitted     in the order of the data, while the groups neither trained nor dropped, with the current batch, are
                 fewer than (1 + D) B; never more than the remaining iterations can train
    staleness    the iteration that trains a group minus its version at admission: an upper bound for every token
    batch t      the oldest B finished groups, as soon as for every d in t..t+S the remaining groups that must be
                 trained by iteration d are at most the (d - t) B that will have been trained by then

So every remaining group can still be trained in time by waiting for the oldest: staleness never exceeds S, no finished
group is dropped, and with S >= D no wait is endless. A group that is filtered, whose environment failed, or whose
prompt is retired (--difficulty), frees its place at once, and the next prompt is admitted.

A checkpoint stores untrained groups as a few flat tensors and JSON: partial trajectories of groups in flight, and the
experience of finished ones with the results of rewards if reward models have not scored them yet. The disk keys are
spelled out here, so that renaming a field does not change the format.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import SampleOrder
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardResult
from trimtab.rollout.episode import EpisodeRecord
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Trajectory, flatten
from trimtab.train.rl.async_client import STORE, AsyncClient, Watchdog
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_client import Failures, RolloutClient
from trimtab.train.rl.rollout_files import ReportedSpan
from trimtab.train.rl.rollout_worker import FinishedGroup, InFlightGroup
from trimtab.train.rl.source import DifficultyPools, RolloutSource, Sampled, useful_groups


@dataclass
class Ledger:
    """Admission and staleness accounting: which places are in flight, finished, filtered or failed."""

    batch_size: int  # B
    ahead: int  # D
    bound: int  # S
    places: int  # total number
    iterations: int  # at most, of the whole run
    iteration: int = 0  # the current one
    admitted: int = 0  # places 0 to admitted - 1
    versions: dict[int, int] = field(default_factory=dict)
    """Version at admission of every group that is admitted and not yet filtered, failed or taken, ordered by place."""
    finished: set[int] = field(default_factory=set)  # the ones among them that can be trained
    filtered: list[int] = field(default_factory=list)  # since the last batch was taken
    failed: list[int] = field(default_factory=list)  # since the last batch was taken
    retired: list[int] = field(default_factory=list)  # passed over since the last batch was taken
    in_hand: bool = False  # whether this iteration's batch has been chosen

    def __post_init__(self) -> None:
        assert self.batch_size > 0 and 0 < self.ahead <= self.bound, "groups must be able to span updates"

    def begin(self, iteration: int) -> None:
        """Start `iteration`; all earlier ones are trained."""
        assert iteration >= self.iteration
        self.in_hand = self.in_hand and iteration == self.iteration
        self.iteration = iteration

    # ---- admission

    def admit(self) -> list[int]:
        """Admit as many groups as fit, and return their places."""
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
        """Drop a finished group without a learning signal."""
        del self.versions[place]
        self.finished.discard(place)
        self.filtered.append(place)

    def pass_over(self, place: int) -> None:
        """Drop a group before it starts, because its prompt is retired."""
        del self.versions[place]
        self.retired.append(place)

    def fail(self, place: int) -> None:
        """Drop a group whose environment failed."""
        assert place not in self.finished, "it was never whole"
        del self.versions[place]
        self.failed.append(place)

    # ---- batches

    @property
    def is_exhausted(self) -> bool:
        """Whether every place has been admitted."""
        return self.admitted >= self.places  # > if the data have fewer prompts than before a resume

    def batch(self) -> list[int] | None:
        """The places of the next batch; fewer than B only at the end of the data. None: not ready yet."""
        assert not self.in_hand
        wanted = min(self.batch_size, len(self.versions)) if self.is_exhausted else self.batch_size
        if len(self.finished) < wanted:
            return None
        chosen = list(islice((place for place in self.versions if place in self.finished), wanted))
        return chosen if self.keeps_staleness_bound(chosen) else None

    def keeps_staleness_bound(self, chosen: Iterable[int]) -> bool:
        """Whether all other groups can still be trained within the staleness bound if `chosen` are trained now."""
        taken = set(chosen)
        last = Counter(version + self.bound for place, version in self.versions.items() if place not in taken)
        due = sum(count for iteration, count in last.items() if iteration < self.iteration)
        for later in range(self.bound + 1):
            due += last[self.iteration + later]
            if due > later * self.batch_size:
                return False
        return True

    @property
    def is_within_staleness_bound(self) -> bool:
        """Whether all groups can still be trained within the bound. Only a smaller bound on resume can break this."""
        if min(self.versions.values(), default=self.iteration) + self.bound < self.iteration:
            return False
        return self.keeps_staleness_bound([] if self.in_hand else islice(self.versions, self.batch_size))

    def take(self, chosen: Iterable[int]) -> dict[int, int]:
        """Take these groups as the batch of this iteration, and return their versions."""
        self.in_hand = True
        self.filtered, self.failed, self.retired = [], [], []
        self.finished.difference_update(chosen)
        return {place: self.versions.pop(place) for place in chosen}

    def requeue(self, versions: dict[int, int], filtered: list[int], failed: list[int], retired: list[int]) -> None:
        """Return groups that were taken and not trained; `filtered`, `failed`, `retired`: the lists before `take`."""
        self.in_hand = False
        self.versions = dict(sorted((self.versions | versions).items()))
        self.finished.update(versions)
        self.filtered, self.failed = filtered + self.filtered, failed + self.failed
        self.retired = retired + self.retired

    # ---- checkpoint

    def state(self) -> dict[str, Any]:
        """Everything but the settings, as JSON values."""
        return {
            "iteration": self.iteration,
            "admitted": self.admitted,
            "versions": list(map(list, self.versions.items())),
            "finished": sorted(self.finished),
            "filtered": list(self.filtered),
            "failed": list(self.failed),
            "retired": list(self.retired),
            "in_hand": self.in_hand,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.iteration, self.admitted, self.in_hand = state["iteration"], state["admitted"], state["in_hand"]
        self.versions = {place: version for place, version in state["versions"]}
        self.finished, self.filtered = set(state["finished"]), list(state["filtered"])
        # Earlier versions had no environments and no pools.
        self.failed, self.retired = list(state.get("failed", [])), list(state.get("retired", []))


class AsyncSource(RolloutSource):
    """Batches of groups that the ledger admits. An engine in the policy's processes generates while the loop waits for
    a batch and pauses during training; engines in their own processes generate all the time."""

    exact = False  # some tokens were sampled by older weights

    def __init__(
        self, options: RLOptions, order: SampleOrder, sampling: SamplingParams, client: RolloutClient, iterations: int
    ):
        """`order`: the prompts over all epochs, one per step; `iterations`: of the run."""
        self.options, self.order, self.sampling, self.client = options, order, sampling, client
        assert options.async_staleness is not None, "settled"
        self.ledger = Ledger(
            options.rollout_batch_size, options.async_queue_size, options.async_staleness, order.steps, iterations
        )
        self.watchdog = Watchdog(options.async_timeout)
        self.workers = AsyncClient(client, sampling, self.watchdog, remote=bool(options.engines_apart))
        self.finished: dict[int, FinishedGroup] = {}  # by place; not yet scored by reward models
        self.scored: dict[int, Experience] = {}
        self.handed_out: dict[int, Experience] = {}  # the last batch, until it is trained
        self.last: dict[str, list[int]] | None = None  # places of the last batch, for ledger.jsonl
        self.pools = DifficultyPools(order.samples, options) if options.difficulty else None
        self.failures = Failures(options)  # since the last batch
        self.clock = Clock()

    # ---- the next batch

    def _next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        ledger, workers = self.ledger, self.workers
        if self.handed_out:  # not trained, because roles had to be rebuilt
            self._put_back()
        ledger.begin(iteration)
        ledger.admitted = max(ledger.admitted, prompts_used)  # when resuming a synchronous run
        self.watchdog.moved()
        with self.clock.waiting():
            while (chosen := self._batch()) is None:
                self._admit()
                workers.resume()
                if stop.signal or not self._collect() or stop.signal:
                    return None
        filtered, failed, retired = list(ledger.filtered), list(ledger.failed), list(ledger.retired)
        versions = ledger.take(chosen)
        self.last = {"trained": chosen, "versions": list(versions.values()), "filtered": filtered}
        self.last |= {"failed": failed} if failed or self.options.plays else {}
        self.last |= {"retired": retired} if self.pools is not None else {}
        if workers.remote:
            self._admit()  # remote workers generate while this batch is trained
        else:
            workers.pause()
        ages = [iteration - version for version in versions.values()]
        figures = {"age": sum(ages) / len(ages), "age_max": float(max(ages))} if ages else {}
        figures |= {"under_way": float(len(ledger.versions)), **self.clock.figures(remote=workers.remote)}
        if self.options.dynamic_filtering:
            figures["filtered_groups"] = float(len(filtered))
        figures |= self.failures.figures() | ({} if self.pools is None else self.pools.figures(len(retired)))
        self.failures = Failures(self.options)
        prompts = len(chosen) + len(filtered) + len(failed) + len(retired)
        if not chosen:
            return None, prompts, figures
        self.handed_out = {place: self.scored.pop(place) for place in chosen}
        return Experience.joined(list(self.handed_out.values())), prompts, figures

    def _put_back(self) -> None:
        assert self.last is not None
        versions = dict(zip(self.last["trained"], self.last["versions"]))
        dropped = (self.last.get(why, []) for why in ("filtered", "failed", "retired"))
        self.ledger.requeue(versions, *dropped)
        self.scored |= self.handed_out
        self.handed_out, self.last = {}, None

    def _batch(self) -> list[int] | None:
        # Reward models may share devices with the engine, so they score while it pauses.
        if self.client.reward_models is None or self.workers.remote:
            self._score()
        chosen = self.ledger.batch()
        if chosen is None or not self.finished:
            return chosen
        self.workers.pause()
        self._score()
        return self.ledger.batch()

    def _admit(self) -> None:
        groups = []
        while places := self.ledger.admit():
            for place in places:
                row, seed = self.order.step_samples(place)[0], request_seed(self.options.seed, place)
                if self.pools is not None and self.pools.is_passed_over(row, place):
                    self.ledger.pass_over(place)
                else:
                    groups.append(InFlightGroup(place, self.ledger.iteration, row, seed))
        self.workers.admit(groups)

    def _collect(self) -> bool:
        """Let workers generate for a while and take their results. False: a stop was requested."""
        polled = self.workers.collect()
        for group in polled.finished:
            self.finished[group.place] = group
            self.ledger.finish(group.place)
        for failed in polled.failed:
            self.ledger.fail(failed.prompt)
        self.clock.add(polled.seconds, polled.read_again)
        if polled.problem is not None:
            with self.client.naming_rows(STORE):
                raise polled.problem
        if polled.places or polled.drawn:
            self.watchdog.moved()
        elif not polled.stopped:
            self.watchdog.check(self.workers.waits)
        for failed in polled.failed:
            where = self.client.stores[STORE].place(self.order.step_samples(failed.prompt)[0])
            self.failures.add([replace(failed, problem=f"{failed.problem}; its prompt stands in {where}")])
        return not polled.stopped

    def _score(self) -> None:
        """Score finished groups with the reward models, and filter groups without a learning signal."""
        if not self.finished:
            return
        parts = list(self.finished.values())
        results = [RewardResult.joined(found) for found in zip(*(part.results for part in parts))]
        experience = Experience.joined([part.experience for part in parts])
        self.client.score(experience, results, STORE)
        if self.pools is not None:
            self.pools.add(experience)
            self.pools.commit()
        useful = set(useful_groups(experience, self.options))
        for group, place in enumerate(self.finished):
            if group in useful:
                self.scored[place] = experience.take(experience.samples_of([group]))
            else:
                self.ledger.filter(place)
        self.finished = {}
        self.watchdog.moved()

    # ---- weight updates, rebuilds and checkpoints

    @contextmanager
    def paused(self) -> Iterator[None]:
        if not self.workers.generating:
            yield
            return
        drained = not self.options.partial_rollout
        self.watchdog.moved()
        with self.clock.waiting():
            while not self.workers.pause(drained=drained):
                drained = self._collect() and drained  # on a stop request, samples need not be finished
        yield
        self.workers.resume()

    def trained(self) -> None:
        super().trained()
        self.handed_out = {}

    def settled(self) -> dict[str, list[int]] | None:
        return self.last

    def spans(self) -> dict[int, list[ReportedSpan]]:
        return self.workers.spans()

    def rebuilt(self) -> None:
        self.workers.rebuilt()

    def engine_replaced(self) -> None:
        self.workers.engine_replaced()

    def state(self, *, in_hand: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.handed_out and not in_hand:
            self._put_back()
        partials, in_flight = partials_on_disk(self.workers.unfinished())
        columns, whole = whole_on_disk(self.scored, self.finished)
        state = {"ledger": self.ledger.state(), "bound": self.ledger.bound, "last": self.last}
        state |= {"failed_episodes": self.failures.episodes} if self.options.plays else {}
        state |= {"failed_rewards": self.failures.rewards} if self.options.failed_reward_share else {}
        return partials | columns, {**state, "under_way": in_flight, "whole": whole}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.ledger.restore(state["ledger"])
        if not self.ledger.is_within_staleness_bound:
            raise UserError(
                f"--async_staleness {self.ledger.bound}: answers of the checkpoint would be older when they are "
                f"trained; give {state['bound']} and the --rollout_batch_size of before"
            )
        self.last = state["last"]
        self.failures.rewards = state.get("failed_rewards", 0)
        self.failures.episodes = state.get("failed_episodes", 0)  # a run that ended because of them may continue
        partials = {name: column for name, column in tensors.items() if name.startswith("drafts/")}
        columns = {name: column for name, column in tensors.items() if name not in partials}
        self.scored, self.finished = whole_from_disk(columns, state["whole"])
        found = partials_from_disk(partials, state["under_way"])
        self.workers.admit([fitting(group, self.sampling) for group in found])


class Clock:
    """Waiting time of the trainer and busy time of the engines between two batches."""

    def __init__(self) -> None:
        self._began: float | None = None  # when the first batch was requested or the last returned
        self._reset()

    def _reset(self) -> None:
        self._wanted = 0.0  # seconds spent waiting for a batch
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

    def figures(self, *, remote: bool) -> dict[str, float]:
        """Columns since the last batch. `remote`: a waiting trainer is idle; otherwise its device generates
        meanwhile."""
        now, wanted, busy = time.monotonic(), self._wanted, self._busy or [0.0]
        assert self._began is not None, "it was waited for"
        whole = max(now - self._began, 1e-9)
        idle = wanted if remote else max(0.0, wanted - max(busy))
        found = {"waiting": idle / whole, "read_again": float(self._read_again)}
        if remote:
            found["engine_busy"] = sum(busy) / len(busy) / whole
        self._began = now
        self._reset()
        return found


# ---- groups in a checkpoint


Kept = tuple[dict[str, Tensor], list[dict[str, Any]]]


def partials_on_disk(groups: Iterable[InFlightGroup]) -> Kept:
    described: list[dict[str, Any]] = []
    trajectories: list[Trajectory] = []
    for group in groups:
        head = {"place": group.place, "version": group.version, "row": group.row, "seed": group.seed}
        described.append({**head, "drafts": [_described(trajectory) for trajectory in group.trajectories]})
        trajectories += group.trajectories
    if not trajectories:
        return {}, described
    flat = flatten(trajectories, prompts=False)
    assert flat.versions_N is not None, "every engine gives them"
    columns = {"drafts/ids": flat.tokens_T, "drafts/log_probs": flat.log_probs_N, "drafts/versions": flat.versions_N}
    if masked := [trajectory for trajectory in trajectories if trajectory.drawn is not None]:
        columns["drafts/drawn"] = flatten(masked, prompts=False).drawn_T
    if routes := [trajectory.routes for trajectory in trajectories if trajectory.routes is not None]:
        columns["drafts/routes"] = np.concatenate(routes)
    return {name: torch.from_numpy(column) for name, column in columns.items()}, described


def _described(trajectory: Trajectory) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sample": trajectory.sample,
        "tokens": len(trajectory.tokens),
        "finish": trajectory.finish,
    }
    if trajectory.drawn is not None:
        found["drawn"] = len(trajectory.log_probs)
    if trajectory.routes is not None:
        found["routes"] = len(trajectory.routes)
    if trajectory.episode is not None:
        prompt = trajectory.prompt_ids or None
        found |= {"episode": trajectory.episode.plain(), "branch": trajectory.branch, "prompt": prompt}
    return found


def partials_from_disk(tensors: dict[str, Tensor], described: Iterable[dict[str, Any]]) -> list[InFlightGroup]:
    columns = {name.removeprefix("drafts/"): column.numpy() for name, column in tensors.items()}
    taken = dict.fromkeys(columns, 0)

    def next_of(name: str, count: int) -> np.ndarray:
        begin = taken[name]
        taken[name] += count
        return columns[name][begin : taken[name]]

    groups = []
    for group in described:
        trajectories = []
        for found in group["drafts"]:
            tokens, drawn = found["tokens"], found.get("drawn", found["tokens"])
            trajectory = Trajectory(
                *(0, found["sample"], found.get("prompt") or []),
                *(next_of("ids", tokens), next_of("log_probs", drawn), found["finish"]),
                versions=next_of("versions", drawn),
                drawn=next_of("drawn", tokens) if "drawn" in found else None,
                episode=EpisodeRecord.of_plain(found["episode"]) if "episode" in found else None,
                branch=found.get("branch", 0),
                routes=next_of("routes", found["routes"]) if "routes" in found else None,
            )
            trajectories.append(trajectory)
        groups.append(InFlightGroup(group["place"], group["version"], group["row"], group["seed"], trajectories))
    return groups


def fitting(group: InFlightGroup, sampling: SamplingParams) -> InFlightGroup:
    """A group from a checkpoint within the sampling limits of this run, which may be lower than before the resume."""
    found = []
    for one in group.trajectories:
        if one.sample >= sampling.n:
            continue
        # In an episode the limit applies to a turn, and the environment's session enforces it.
        full = one.finish is None and one.episode is None and len(one.tokens) >= sampling.max_new_tokens
        found.append(replace(one, finish="length") if full else one)
    return replace(group, trajectories=found)


def whole_on_disk(scored: dict[int, Experience], finished: dict[int, FinishedGroup]) -> Kept:
    found = scored | {place: group.experience for place, group in finished.items()}
    tensors = {f"{place}/{name}": column for place, own in found.items() for name, column in own.tensors().items()}
    described: list[dict[str, Any]] = [{"place": place} for place in scored]
    for place, group in finished.items():
        described.append({"place": place, "results": [asdict(result) for result in group.results]})
    return tensors, described


def whole_from_disk(
    tensors: dict[str, Tensor], described: Iterable[dict[str, Any]]
) -> tuple[dict[int, Experience], dict[int, FinishedGroup]]:
    columns: dict[str, dict[str, Tensor]] = {}
    for name, column in tensors.items():
        place, own = name.split("/", 1)
        columns.setdefault(place, {})[own] = column
    scored, finished = {}, {}
    for group in described:
        place = group["place"]
        experience = Experience.from_tensors(columns[str(place)])
        if "results" in group:
            results = [RewardResult(**result) for result in group["results"]]
            finished[place] = FinishedGroup(place, experience, results)
        else:
            scored[place] = experience
    return scored, finished
