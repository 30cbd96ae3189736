"""Groups that are not trained yet, as a checkpoint keeps them: a few flat tensors, and the rest as JSON has it.

Those that are not whole are partial trajectories, to be resumed. Of those that are, the experience; where reward models
have not scored it yet, also the results of other rewards. The keys are those of checkpoints, whatever the fields are
called.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import RewardResult
from trimtab.rollout.episode import Episode
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory, flatten
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_worker import FailedGroup


@dataclass
class InFlightGroup:
    """A group that is neither finished nor trained: it may outlive an update."""

    place: int  # in the order of the prompts
    version: int  # of the weights when it was admitted: the iterations done by then
    row: int  # of the prompt data
    seed: int
    trajectories: list[Trajectory] = field(default_factory=list)  # of its samples; empty: not begun


@dataclass
class Admission:
    """Groups that a worker is to generate, and the prompt of each."""

    groups: list[InFlightGroup]
    questions: PromptBatch


@dataclass
class FinishedGroup:
    """A group whose samples have all finished, with the results of the rewards near the engine."""

    place: int
    experience: Experience
    results: list[RewardResult]


@dataclass
class Collected:
    """What one worker has done since it was asked last."""

    finished: list[FinishedGroup]
    drawn: int  # tokens
    read_again: int  # tokens of partial rollouts that other weights had to read
    seconds: float  # in which the engine was at work
    failed: list[FailedGroup] = field(default_factory=list)


@dataclass
class Wait:
    """What one sample of a group is waiting for."""

    place: int
    sample: int
    what: str
    tokens: int  # that it has so far
    seconds: float  # for which it has waited


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
    return {name: torch.from_numpy(column) for name, column in columns.items()}, described


def _described(trajectory: Trajectory) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sample": trajectory.sample,
        "tokens": len(trajectory.tokens),
        "finish": trajectory.finish,
    }
    if trajectory.drawn is not None:
        found["drawn"] = len(trajectory.log_probs)
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
                episode=Episode.of_plain(found["episode"]) if "episode" in found else None,
                branch=found.get("branch", 0),
            )
            trajectories.append(trajectory)
        groups.append(InFlightGroup(group["place"], group["version"], group["row"], group["seed"], trajectories))
    return groups


def fitting(group: InFlightGroup, sampling: SamplingParams) -> InFlightGroup:
    """For a run that was told on resume to draw fewer or shorter answers: none is more than that."""
    found = []
    for one in group.trajectories:
        if one.sample >= sampling.n:
            continue
        # In an episode the limit is one of a turn, and the environment's session applies it.
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
