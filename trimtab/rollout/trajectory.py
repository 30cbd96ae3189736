"""One trajectory: a prompt, the tokens after it, which of them the model drew, with log-probs and weight versions.

An answer is a trajectory, and so is an episode with an environment: turns of the model with observations between them.
A partial rollout is a trajectory without a finish reason. Engines resume from it, with the same weights or later ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from trimtab.errors import UserError
from trimtab.rollout.episode import EpisodeRecord

# Of episodes also: the context is full, --max_turns is reached, the environment truncated it, or failed.
Finish = Literal["stop", "length", "abort", "context", "turns", "truncated", "failed"]


@dataclass
class TopLogprobs:
    """The most likely tokens at each position of an answer, the likeliest first."""

    tokens: np.ndarray  # int32 [tokens of the answer, top_log_probs]
    log_probs: np.ndarray  # fp32, like those of the tokens that were drawn


@dataclass
class PromptLogprobs:
    """The log-probs of a prompt's tokens but the first, fp32, at the sampling temperature (at 1 when greedy)."""

    log_probs: np.ndarray
    alternatives: TopLogprobs


@dataclass
class Trajectory:
    """Log-probs and versions are those of the drawn tokens only. Log-probs are the model's own, fp32, at the sampling
    temperature (at 1 when greedy). Other threads may read it, so arrays are replaced and never written into."""

    prompt: int  # index of its request in the call or session
    sample: int  # index among the n samples of the request
    prompt_ids: list[int]  # empty in a partial one: the request's
    tokens: np.ndarray  # int32; may be given as a list
    log_probs: np.ndarray
    finish: Finish | None = None  # None: not finished
    plain_log_probs: np.ndarray | None = None  # at temperature 1, if requested
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # of the weights, from every engine
    drawn: np.ndarray | None = None  # mask of the tokens that the model drew; None: all
    episode: EpisodeRecord | None = None  # the environment's record, shared by all branches of an episode
    branch: int = 0  # index of this sequence in an episode whose history was rewritten
    alternatives: TopLogprobs | None = None  # if requested, and there are tokens
    prompt_log_probs: PromptLogprobs | None = None  # if requested
    routes: "RouteArray | None" = None  # its last row is of the last token

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens, dtype=np.int32)

    @classmethod
    def empty(cls, sample: int, prompt_ids: list[int] | None = None) -> "Trajectory":
        """A trajectory without tokens. Samples of one prompt share its list."""
        tokens = np.zeros(0, dtype=np.int32)
        return cls(
            0, sample, [] if prompt_ids is None else prompt_ids, tokens, tokens.astype(np.float32), versions=tokens
        )

    @cached_property
    def ids(self) -> list[int]:
        """The tokens as a list. Making it costs as much as everything else that is done with an answer."""
        return self.tokens.tolist()

    @property
    def finish_reason(self) -> Finish:
        """Of a finished one."""
        assert self.finish is not None, "a partial rollout has none"
        return self.finish

    @property
    def whole_ids(self) -> list[int]:
        """Prompt and tokens."""
        return self.prompt_ids + self.tokens.tolist()

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def mask(self) -> np.ndarray:
        """Which tokens the model drew."""
        return np.ones(len(self.tokens), dtype=bool) if self.drawn is None else self.drawn

    def with_observation(self, ids: Sequence[int] | np.ndarray) -> "Trajectory":
        """Append tokens that the model did not draw."""
        tokens = np.concatenate((self.tokens, np.asarray(ids, dtype=np.int32)))
        drawn = np.concatenate((self.mask, np.zeros(len(ids), dtype=bool)))
        return replace(self, tokens=tokens, drawn=drawn, routes=merge_routes(self.routes, None, len(ids)))

    def with_turn(self, turn: "Trajectory") -> "Trajectory":
        """Append the tokens that the model drew in a turn, finished or partial."""
        plain = [values for values in (self.plain_log_probs, turn.plain_log_probs) if values is not None]
        return replace(
            self,
            tokens=np.concatenate((self.tokens, turn.tokens)),
            log_probs=np.concatenate((self.log_probs, turn.log_probs)),
            plain_log_probs=np.concatenate(plain) if plain else None,
            versions=np.concatenate((self.versions, turn.versions)),
            drawn=np.concatenate((self.mask, np.ones(len(turn.tokens), dtype=bool))),
            routes=merge_routes(self.routes, turn.routes, len(turn.tokens)),
        )

    def versions_with(self, count: int, version: int) -> np.ndarray:
        """Versions of `count` tokens: this trajectory's, followed by new ones that these weights drew."""
        new = np.full(count - len(self.tokens), version, dtype=np.int32)
        return np.concatenate((self.versions, new)) if len(self.versions) else new

    def stored(self) -> "Trajectory":
        """As its group keeps it until it is trained: an aborted one is partial, and the request's prompt is not
        repeated."""
        finish = None if self.finish == "abort" else self.finish
        prompt_ids = [] if self.episode is None else self.prompt_ids
        own = replace(self, prompt=0, prompt_ids=prompt_ids, finish=finish)
        own.plain_log_probs = own.alternatives = own.prompt_log_probs = None
        return own


# ---- routes of mixtures of experts


RouteArray: TypeAlias = np.ndarray
"""Experts that an engine's routers chose [tokens, layers, top_k], uint8 or int16: for the last tokens of a sequence or
for all, prompt included. The largest number of the dtype (`no_route`): not known, as of the last token of an answer,
which no layer has seen."""


def no_route(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).max)


def fit_routes(routes: RouteArray, length: int) -> RouteArray:
    """The routes of the last `length` tokens; unknown ones before those that are known."""
    missing = length - len(routes)
    if missing <= 0:
        return routes[-missing:]
    return np.pad(routes, ((missing, 0), (0, 0), (0, 0)), constant_values=no_route(routes.dtype))


def merge_routes(before: RouteArray | None, after: RouteArray | None, new: int) -> RouteArray | None:
    """The routes of a sequence that has grown by `new` tokens: those of `before` where they are known, since their
    tokens were sampled with them, and those of `after`, in which earlier tokens were read again."""
    known = [routes for routes in (before, after) if routes is not None]
    if not known:
        return None
    length = max(0 if before is None else len(before) + new, 0 if after is None else len(after))
    merged = np.full((length, *known[0].shape[1:]), no_route(known[0].dtype), known[0].dtype)
    if after is not None:
        merged[length - len(after) :] = after
    if before is not None and len(before):
        place = merged[length - new - len(before) : length - new]
        place[...] = np.where(before == no_route(before.dtype), place, before)
    return merged


def partials_to_run(given: Sequence[Trajectory] | None, samples: int, request: int, limit: int) -> Sequence[Trajectory]:
    """The samples of a request: the given partial ones, to be resumed, or all of them from the beginning."""
    if given is None:
        return [Trajectory.empty(sample) for sample in range(samples)]
    for partial in given:
        assert partial.finish is None and 0 <= partial.sample < samples, "an unfinished sample of this prompt"
        if len(partial.tokens) >= limit:
            raise UserError(
                f"sample {partial.sample} of prompt {request} has {len(partial.tokens)} tokens already, and its limit "
                f"is {limit}; give at least {len(partial.tokens) + 1}"
            )
    return given


class FlatTrajectories(NamedTuple):
    """Many trajectories one after another, without padding."""

    tokens_T: np.ndarray  # int32
    drawn_T: np.ndarray  # bool
    log_probs_N: np.ndarray  # fp32, of the drawn tokens
    versions_N: np.ndarray | None  # int32, of the drawn tokens; None: not known of all
    routes_TLK: RouteArray | None  # None: not known of any


def flatten(trajectories: Sequence[Trajectory], *, prompts: bool) -> FlatTrajectories:
    """`prompts`: each trajectory's tokens follow those of its prompt."""
    tokens, masks = [one.tokens for one in trajectories], [one.mask for one in trajectories]
    if prompts:
        lists = {id(one.prompt_ids): one.prompt_ids for one in trajectories}  # samples of one prompt share its list
        arrays = {key: np.array(ids, dtype=np.int32) for key, ids in lists.items()}
        before = [arrays[id(one.prompt_ids)] for one in trajectories]
        tokens = [part for pair in zip(before, tokens) for part in pair]
        masks = [part for ids, mask in zip(before, masks) for part in (np.zeros(len(ids), dtype=bool), mask)]
    versions = None
    if all(len(one.versions) or not len(one.log_probs) for one in trajectories):
        versions = np.concatenate([one.versions for one in trajectories])
    log_probs, routes = np.concatenate([one.log_probs for one in trajectories]), None
    if known := [one.routes for one in trajectories if one.routes is not None]:
        lengths = [one.length if prompts else len(one.tokens) for one in trajectories]
        routes = [known[0][:0] if one.routes is None else one.routes for one in trajectories]
        routes = np.concatenate([fit_routes(own, length) for own, length in zip(routes, lengths)])
    return FlatTrajectories(np.concatenate(tokens), np.concatenate(masks), log_probs, versions, routes)
