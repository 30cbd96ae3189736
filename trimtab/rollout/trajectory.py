"""What goes into a rollout engine and what comes out of it, whichever engine it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from trimtab.errors import UserError
from trimtab.rollout.episode import Episode

# Of episodes also: the context is full, --max_turns is reached, the environment has cut it off, or has failed.
Finish = Literal["stop", "length", "abort", "context", "turns", "truncated", "failed"]


@dataclass
class Alternatives:
    """The most likely tokens at each place of an answer, the likeliest first."""

    tokens: np.ndarray  # int32 [tokens of the answer, so many]
    log_probs: np.ndarray  # fp32, like those of the tokens that were drawn


@dataclass
class Rollout:
    """One answer, or turns of the model with what the world said between them. Log-probs are the model's own, of the
    tokens that it drew, fp32, at the sampling temperature (at 1 when greedy)."""

    prompt: int  # which prompt of the call
    sample: int  # which of its n samples
    prompt_ids: list[int]
    tokens: np.ndarray  # int32; may be given as a list
    log_probs: np.ndarray
    finish: Finish
    plain_log_probs: np.ndarray | None = None  # at temperature 1, where asked for
    versions: np.ndarray | None = None  # int32: of the weights that drew each token; every engine says it
    drawn: np.ndarray | None = None  # which of the tokens the model drew itself; None: all
    episode: Episode | None = None  # of an environment: who said what; all branches of it have the same
    branch: int = 0  # which sequence of an episode whose history was rewritten on its way
    alternatives: Alternatives | None = None  # where asked for, of an answer that has tokens

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens, dtype=np.int32)

    @cached_property
    def ids(self) -> list[int]:
        """The tokens as a list, which costs as much to make as everything else that is done with an answer."""
        return self.tokens.tolist()


@dataclass
class Draft:
    """A sample so far, to be written on by the same weights or later ones."""

    sample: int  # which of its prompt's n samples
    tokens: np.ndarray  # int32; may be given as a list
    log_probs: np.ndarray  # fp32, as they were drawn
    versions: np.ndarray  # int32: of the weights that drew each token
    finish: Finish | None = None  # how it ended, if it has
    drawn: np.ndarray | None = None  # which of the tokens the model drew itself; None: all
    episode: Episode | None = None  # of an environment: what another instance is played to go on from here
    branch: int = 0  # of an episode in several sequences; its sample then has a draft for each
    prompt_ids: list[int] | None = None  # what an episode began with; None: the prompt that was asked for

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens, dtype=np.int32)

    @cached_property
    def ids(self) -> list[int]:
        """The tokens as a list."""
        return self.tokens.tolist()

    @classmethod
    def empty(cls, sample: int) -> "Draft":
        nothing = np.zeros(0, dtype=np.int32)
        return cls(sample, nothing, nothing.astype(np.float32), nothing)

    @classmethod
    def of(cls, rollout: Rollout) -> "Draft":
        """What an engine has handed over. One that was aborted has not ended."""
        assert rollout.versions is not None, "an answer as an engine gives it"
        finish = None if rollout.finish == "abort" else rollout.finish
        own = (rollout.sample, rollout.tokens, rollout.log_probs, rollout.versions)
        prompt_ids = None if rollout.episode is None else rollout.prompt_ids
        return cls(*own, finish, rollout.drawn, rollout.episode, rollout.branch, prompt_ids)

    def versions_of(self, count: int, version: int) -> np.ndarray:
        """Of the first `count` tokens, where this one's are followed by some that these weights drew."""
        new = np.full(count - len(self.tokens), version, dtype=np.int32)
        return np.concatenate((self.versions, new)) if len(self.versions) else new


def drafts_of(given: Sequence[Draft] | None, samples: int, request: int, limit: int) -> Sequence[Draft]:
    """The samples of a request: those that are given, to be written on, or all of them from the beginning."""
    if given is None:
        return [Draft.empty(sample) for sample in range(samples)]
    for draft in given:
        assert draft.finish is None and 0 <= draft.sample < samples, "a sample of this prompt that has not ended"
        if len(draft.tokens) >= limit:
            raise UserError(
                f"sample {draft.sample} of prompt {request} has {len(draft.tokens)} tokens already, and its limit is "
                f"{limit}; give at least {len(draft.tokens) + 1}"
            )
    return given
