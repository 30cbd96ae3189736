"""Groups that are not trained yet, as a checkpoint keeps them: a few flat tensors, and the rest as JSON has it.

Those that are not whole are drafts, to be written on. Of those that are, the experience; where reward models have not
judged it yet, also what other rewards have said.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.rewards.types import RewardResult
from trimtab.rollout.episode import Episode
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Draft
from trimtab.train.rl.answers import Answers, UnderWay
from trimtab.train.rl.experience import Experience

Kept = tuple[dict[str, Tensor], list[dict[str, Any]]]


def drafts_on_disk(groups: Iterable[UnderWay]) -> Kept:
    described: list[dict[str, Any]] = []
    drafts: list[Draft] = []
    for group in groups:
        described.append({**vars(group), "drafts": [_described(draft) for draft in group.drafts]})
        drafts += group.drafts
    if not drafts:
        return {}, described
    columns = {
        "ids": np.concatenate([draft.tokens for draft in drafts]),
        "log_probs": np.concatenate([draft.log_probs for draft in drafts]),
        "versions": np.concatenate([draft.versions for draft in drafts]),
    }
    masks = [draft.drawn for draft in drafts if draft.drawn is not None]
    if masks:
        columns["drawn"] = np.concatenate(masks)
    return {f"drafts/{name}": torch.from_numpy(column) for name, column in columns.items()}, described


def _described(draft: Draft) -> dict[str, Any]:
    found: dict[str, Any] = {"sample": draft.sample, "tokens": len(draft.tokens), "finish": draft.finish}
    if draft.drawn is not None:
        found["drawn"] = len(draft.log_probs)
    if draft.episode is not None:
        found |= {"episode": draft.episode.plain(), "branch": draft.branch, "prompt": draft.prompt_ids}
    return found


def drafts_from_disk(tensors: dict[str, Tensor], described: Iterable[dict[str, Any]]) -> list[UnderWay]:
    columns = {name.removeprefix("drafts/"): column.numpy() for name, column in tensors.items()}
    taken = dict.fromkeys(columns, 0)

    def next_of(name: str, count: int) -> np.ndarray:
        begin = taken[name]
        taken[name] += count
        return columns[name][begin : taken[name]]

    groups = []
    for group in described:
        drafts = []
        for draft in group["drafts"]:
            tokens, drawn = draft["tokens"], draft.get("drawn", draft["tokens"])
            own = (next_of("ids", tokens), next_of("log_probs", drawn), next_of("versions", drawn))
            mask = next_of("drawn", tokens) if "drawn" in draft else None
            episode = Episode.of_plain(draft["episode"]) if "episode" in draft else None
            more = {"branch": draft.get("branch", 0), "prompt_ids": draft.get("prompt")}
            drafts.append(Draft(draft["sample"], *own, draft["finish"], mask, episode, **more))
        groups.append(UnderWay(**{**group, "drafts": drafts}))
    return groups


def fitting(group: UnderWay, sampling: SamplingParams) -> UnderWay:
    """For a run that was told on resume to draw fewer or shorter answers: none is more than that."""
    drafts = []
    for draft in group.drafts:
        if draft.sample >= sampling.n:
            continue
        # In an episode the limit is one of a turn, and whoever plays it looks at that.
        full = draft.finish is None and draft.episode is None and len(draft.tokens) >= sampling.max_new_tokens
        drafts.append(replace(draft, finish="length") if full else draft)
    return replace(group, drafts=drafts)


def whole_on_disk(judged: dict[int, Experience], written: dict[int, Answers]) -> Kept:
    found = judged | {place: answers.experience for place, answers in written.items()}
    tensors = {f"{place}/{name}": column for place, own in found.items() for name, column in own.tensors().items()}
    described: list[dict[str, Any]] = [{"place": place} for place in judged]
    for place, answers in written.items():
        described.append({"place": place, "results": [asdict(result) for result in answers.results]})
    return tensors, described


def whole_from_disk(
    tensors: dict[str, Tensor], described: Iterable[dict[str, Any]]
) -> tuple[dict[int, Experience], dict[int, Answers]]:
    columns: dict[str, dict[str, Tensor]] = {}
    for name, column in tensors.items():
        place, own = name.split("/", 1)
        columns.setdefault(place, {})[own] = column
    judged, written = {}, {}
    for group in described:
        experience = Experience.from_tensors(columns[str(group["place"])])
        if "results" in group:
            written[group["place"]] = Answers(experience, [RewardResult(**result) for result in group["results"]])
        else:
            judged[group["place"]] = experience
    return judged, written
