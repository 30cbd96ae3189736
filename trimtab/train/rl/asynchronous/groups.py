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
from trimtab.rollout.types import Draft, Sampling
from trimtab.train.rl.answers import Answers, UnderWay
from trimtab.train.rl.experience import Experience

Kept = tuple[dict[str, Tensor], list[dict[str, Any]]]


def drafts_on_disk(groups: Iterable[UnderWay]) -> Kept:
    described: list[dict[str, Any]] = []
    drafts: list[Draft] = []
    for group in groups:
        own = [{"sample": d.sample, "tokens": len(d.tokens), "finish": d.finish} for d in group.drafts]
        described.append({**vars(group), "drafts": own})
        drafts += group.drafts
    if not drafts:
        return {}, described
    columns = {
        "ids": np.concatenate([draft.tokens for draft in drafts]),
        "log_probs": np.concatenate([draft.log_probs for draft in drafts]),
        "versions": np.concatenate([draft.versions for draft in drafts]),
    }
    return {f"drafts/{name}": torch.from_numpy(column) for name, column in columns.items()}, described


def drafts_from_disk(tensors: dict[str, Tensor], described: Iterable[dict[str, Any]]) -> list[UnderWay]:
    groups, begin = [], 0
    for group in described:
        drafts = []
        for draft in group["drafts"]:
            own = slice(begin, begin := begin + draft["tokens"])
            names = ("ids", "log_probs", "versions")
            ids, log_probs, versions = (tensors[f"drafts/{name}"][own].numpy() for name in names)
            drafts.append(Draft(draft["sample"], ids, log_probs, versions, draft["finish"]))
        groups.append(UnderWay(**{**group, "drafts": drafts}))
    return groups


def fitting(group: UnderWay, sampling: Sampling) -> UnderWay:
    """For a run that was told on resume to draw fewer or shorter answers: none is more than that."""
    drafts = []
    for draft in group.drafts[: sampling.n]:
        full = draft.finish is None and len(draft.tokens) >= sampling.max_new_tokens
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
