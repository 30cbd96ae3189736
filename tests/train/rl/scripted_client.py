"""Stand-ins for those who write: processes whose groups take random times, without any model."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.distributed.launcher import EngineLost, Group, PendingCall, Processes, Unanswered
from trimtab.rewards.types import RewardFailed, RewardResult, RewardSum
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_client import RolloutClient
from trimtab.train.rl.rollout_worker import Admission, Collected, FinishedGroup, InFlightGroup, Wait

SAMPLES = 2


class Process:
    """One that writes: a token of every sample for each call, until a group has as many as it is drawn to get."""

    def __init__(self, seed: int, longest: int = 12):
        self.random, self.longest = random.Random(seed), longest
        self.groups: dict[int, InFlightGroup] = {}
        self.lengths: dict[int, int] = {}
        self.version, self.writing = 0, False
        self.failing: set[int] = set()  # places whose reward fails
        self.stuck = False

    def admit(self, admission: Admission, *, sampling: Any) -> None:
        assert [g.row for g in admission.groups] == admission.prompt_batch.rows
        for group in admission.groups:
            assert group.place not in self.groups, "given once"
            drafts = group.trajectories or [Trajectory.empty(sample) for sample in range(SAMPLES)]
            self.groups[group.place] = replace(group, trajectories=drafts)
            self.lengths[group.place] = max(self.random.randint(1, self.longest), len(drafts[0].ids))

    def collect(self, *, seconds: float, at_once: bool) -> Collected | RewardFailed | None:
        self.writing = True
        drawn, written = 0, []
        for place in [] if self.stuck else list(self.groups):
            group = self.groups[place]
            if len(group.trajectories[0].ids) < self.lengths[place]:
                group.trajectories = [self._longer(draft) for draft in group.trajectories]
                drawn += SAMPLES
            elif place in self.failing:
                return RewardFailed("the reward broke", group.row)
            else:
                written.append(self._written(self.groups.pop(place)))
        return Collected(written, drawn, 0, 0.0)

    def _longer(self, draft: Trajectory) -> Trajectory:
        versions = np.append(draft.versions, np.int32(self.version)).astype(np.int32)
        log_probs = np.append(draft.log_probs, np.float32(-1)).astype(np.float32)
        return replace(draft, tokens=[*draft.ids, 7], log_probs=log_probs, versions=versions)

    def _written(self, group: InFlightGroup) -> FinishedGroup:
        rollouts = [
            Trajectory(0, d.sample, [1, 2], d.ids, d.log_probs, "stop", versions=d.versions) for d in group.trajectories
        ]
        scores = [float(group.row % 3), 1.0]
        return FinishedGroup(group.place, Experience.of([group.row] * SAMPLES, rollouts), [RewardResult(scores)])

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        self.writing = False
        return True

    def resume(self) -> None:
        self.writing = True

    def unfinished(self) -> list[InFlightGroup]:
        return [replace(group) for group in self.groups.values()]

    def waits(self) -> list[Wait]:
        return [Wait(place, 0, "its next token", 3, 1.5) for place in self.groups]


class Found(PendingCall):
    """Where one may be gone, and another one late."""

    late: int | None = None

    def poll(self, seconds: float) -> list[Any]:
        found, late = super().wait(seconds), self.late
        self.late = None
        return [Unanswered() if part == late else told for part, told in enumerate(found)]

    def wait(self, seconds: float | None = None) -> list[Any]:
        for result in self.poll(0):
            if isinstance(result, EngineLost):
                raise result
        return self.poll(0)


class SeveralWorkers(Group):
    """They, as the loop calls them."""

    name = "rollouts"

    def __init__(self, processes: Sequence[Process]):
        self.members = list(processes)
        self.processes = Processes.apart(range(len(self.members)))
        self.lost: dict[str, int] = {}  # method -> which of them is found to be gone when it is called
        self.late: dict[str, int] = {}  # method -> which of them has not answered it when that is first asked
        self.gone: set[int] = set()
        self.mended = 0

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> PendingCall:
        if (rank := self.lost.pop(method, None)) is not None:
            self.gone.add(rank)
        own = [()] * self.size if parts is None else [(part,) for part in parts]
        results = [
            EngineLost(f"engine {rank} is gone", rank)
            if rank in self.gone
            else getattr(member, method)(*part, **shared)
            for rank, (member, part) in enumerate(zip(self.members, own, strict=True))
        ]
        call = Found(method, results)
        call.late = self.late.pop(method, None)
        return call

    def mend(self) -> None:
        """Others are there, while nobody writes."""
        self.mended += 1
        for rank in self.gone:
            self.members[rank] = Process(seed=rank)
        assert not any(member.writing for member in self.members)
        self.gone.clear()

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        return self.call(method, values)

    def reinit_process_group(self) -> bool:
        return False


class Store:
    """Prompts without anything in them."""

    input_key = "input"

    def ids(self, row: int) -> list[int]:
        return [1, 2]

    def place(self, row: int) -> str:
        return f"line {row + 1}"


class FakeClient(RolloutClient):
    def __init__(self, rollouts: Group, reward_models: Group | None = None):
        self.stores, self.rollouts, self.reward_models = {"train": Store()}, rollouts, reward_models
        self.reward_sum, self._near = RewardSum(["reward"], [1.0]), False

    def _scored(self, prompts: Any, experience: Experience) -> list[RewardResult]:
        return []
