"""What a Learner gives and takes: a `Sample` is one token sequence with what is known of it, an `Episode` what was
played in an environment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.envs.types import Message, Task
from trimtab.errors import UserError
from trimtab.rollout.episode import Segment
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Trajectories

SHOWN = 40  # characters of a text
OF_TOKENS = ("log_probs", "advantages", "weights", "reference")


@dataclass(repr=False)
class Sample:
    """A token sequence: a prompt, and after it tokens to be learnt from. T tokens, N of them trained.

    What `Learner.sample` and `Learner.play` give can be handed on as it is; advantages and weights are put into it on
    the way. Made by hand, `Sample(ids, trained)` is enough for the loss "sft".
    """

    ids: list[int]
    """All T tokens, prompt first."""
    trained: np.ndarray
    """bool [T]: the N tokens that the model drew, or is to learn. Never the first: nothing predicts it."""
    log_probs: np.ndarray | None = None
    """[N]: log-probabilities of the trained tokens as they were drawn, at `temperature`."""
    finish: str = "stop"
    """How it ended: "stop" or "length"; of episodes also "context", "turns", "truncated" or "failed"."""
    advantages: np.ndarray | float | None = None
    """[N], or one number for all trained tokens."""
    weights: np.ndarray | float | None = None
    """[N], or one number: what each token's loss is multiplied by; unset: 1."""
    reward: float | None = None
    """For your own use. Of an episode, the sum of what the environment gave."""
    reference: np.ndarray | None = None
    """[N]: log-probabilities of a reference, for losses that have a KL: `learner.log_probs(data, reference=True)`."""
    text: str = ""
    """What the trained tokens say, without special ones; "" where there is no tokenizer."""
    prompt: int = 0
    """Which prompt or task of the call it belongs to."""
    temperature: float = 1.0
    """At which `log_probs` are meant, here and where it is trained."""
    versions: np.ndarray | None = None
    """int [N]: `Learner.version` of the weights that drew each token."""
    answer: int = 0
    """Which of the prompt's answers it is."""
    branch: int = 0
    """Of an episode in several sequences, which one; all of them are one answer."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        found = np.flatnonzero(self.trained)
        return int(found[0]) if len(found) else len(self.ids)

    @property
    def trained_ids(self) -> list[int]:
        """The N tokens that are trained."""
        return np.asarray(self.ids)[np.asarray(self.trained, dtype=bool)].tolist()

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 3]}..."
        reward = "" if self.reward is None else f", reward={self.reward:g}"
        drawn = int(np.count_nonzero(self.trained))
        return f"Sample({text!r}, {len(self.ids)} tokens, {drawn} trained, finish={self.finish!r}{reward})"

    @classmethod
    def of(cls, rollout: Trajectory, text: str, temperature: float) -> "Sample":
        """What an engine gave."""
        return cls(
            rollout.whole_ids,
            np.concatenate([np.zeros(len(rollout.prompt_ids), dtype=bool), rollout.mask]),
            np.asarray(rollout.log_probs, dtype=np.float32),
            rollout.finish_reason,
            text=text,
            prompt=rollout.prompt,
            temperature=temperature,
            versions=rollout.versions,
            answer=rollout.sample,
            branch=rollout.branch,
        )


@dataclass(repr=False)
class Episode:
    """What was played in an environment, and how it went."""

    task: Task
    samples: list[Sample]
    """Its token sequences to train on: one, unless its history was rewritten on the way (docs/agents.md)."""
    reward: float | None
    """What the environment gave, all turns together; None where it failed: no score is made up."""
    finish: str
    said: list[Segment] = field(default_factory=list)
    """Turns of the model (`drawn`), each with its reward, and what the world said to them."""
    logs: dict[str, float] = field(default_factory=dict)
    """Figures of the environment's own."""
    problem: str | None = None
    """Why it failed, in the environment's words."""

    @property
    def messages(self) -> list[Message]:
        """The conversation behind the opening."""
        return [message for said in self.said for message in said.messages]

    def __repr__(self) -> str:
        turns = sum(said.drawn for said in self.said)
        reward = self.problem if self.reward is None else f"reward={self.reward:g}"
        return f"Episode({turns} turn{'' if turns == 1 else 's'}, finish={self.finish!r}, {reward})"


@dataclass
class Rows(Trajectories):
    """Samples as passes are cut out of them; columns are over the trained tokens of all."""

    log_probs_N: Tensor | None = None
    advantages_N: Tensor | None = None
    weights_N: Tensor | None = None
    reference_N: Tensor | None = None

    @classmethod
    def of(cls, data: Sequence[Sample], vocabulary: int, context: int | None, *columns: str) -> "Rows":
        """Checked: a mistake is told with the sample that it is in. `columns`: names of a sample's fields."""
        for number, sample in enumerate(data):
            _check(sample, number, vocabulary, context)
        trained = [np.asarray(sample.trained, dtype=bool) for sample in data]
        found = {f"{name}_N": _column(data, trained, name) for name in columns}
        return cls(
            torch.from_numpy(np.concatenate([np.asarray(sample.ids, dtype=np.int32) for sample in data])),
            torch.from_numpy(np.concatenate(trained)),
            torch.tensor([sample.prompt_length for sample in data]),
            torch.tensor([len(sample.ids) for sample in data]),
            **found,
        )


def as_list(data: Any) -> list[Sample]:
    """The samples of a call; a UserError names what is not one."""
    if isinstance(data, Sample):
        raise UserError("data is one Sample; give a list: [sample]")
    try:
        found = list(data)
    except TypeError:
        raise UserError(f"data is {_named(data)}; give a list of Sample") from None
    if not found:
        raise UserError("data is empty; give at least one Sample")
    for number, sample in enumerate(found):
        if isinstance(sample, Episode):
            raise UserError(f"data[{number}] is an Episode; give its samples: [s for e in episodes for s in e.samples]")
        if not isinstance(sample, Sample):
            raise UserError(f"data[{number}] is {_named(sample)}; give a list of Sample")
    return found


def temperature_of(data: Sequence[Sample]) -> float:
    """The one at which all of these were drawn."""
    try:
        found = sorted({float(sample.temperature) for sample in data})
    except (TypeError, ValueError):
        raise UserError("a sample's temperature is no number; above 0 is needed") from None
    if len(found) > 1:
        named = ", ".join(f"{one:g}" for one in found)
        raise UserError(f"data has samples of temperatures {named}; give those of each in a call of their own")
    if not np.isfinite(found[0]) or found[0] <= 0:
        raise UserError(f"a sample's temperature is {found[0]:g}; above 0 is needed (greedy answers have 1)")
    return found[0]


def _check(sample: Sample, number: int, vocabulary: int, context: int | None) -> None:
    where = f"data[{number}]"
    try:
        ids, trained = np.asarray(sample.ids), np.asarray(sample.trained)
    except ValueError:
        raise UserError(f"{where}: ids and trained must be lists of one number for each token") from None
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{where}.ids must be a list of token ids with at least one, not {_shown(sample.ids)}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise UserError(f"{where}.ids has a token outside the model's vocabulary of {vocabulary}")
    if trained.shape != ids.shape:
        raise UserError(f"{where}.trained has shape {trained.shape}, and there are {len(ids)} ids; one for each")
    if trained.dtype != bool and not np.isin(trained, (0, 1)).all():
        raise UserError(f"{where}.trained has values that are neither True nor False")
    if trained[0]:
        raise UserError(f"{where}.trained marks the first token, which nothing predicts; put one before it")
    if context is not None and len(ids) > context:
        raise UserError(f"{where} has {len(ids)} tokens, and the model's context is {context}; shorten it")


def _column(data: Sequence[Sample], trained: Sequence[np.ndarray], name: str) -> Tensor:
    assert name in OF_TOKENS, name
    parts = []
    for number, (sample, mask) in enumerate(zip(data, trained)):
        count, given = int(mask.sum()), getattr(sample, name)
        if given is None and name == "weights":
            given = 1.0
        if given is None:
            raise UserError(f"data[{number}].{name} is not set, and {_needed(name)}")
        try:
            values = np.asarray(given, dtype=np.float32)
        except (TypeError, ValueError):
            raise UserError(f"data[{number}].{name} must be numbers, not {_shown(given)}") from None
        if values.ndim == 0 and name in ("advantages", "weights"):
            values = np.full(count, values)
        if values.shape != (count,):
            one = ", or one number" if name in ("advantages", "weights") else ""
            raise UserError(
                f"data[{number}].{name} has shape {values.shape}, and {count} tokens are trained; one for each{one}"
            )
        if not np.isfinite(values).all():
            raise UserError(f"data[{number}].{name} has a value that is not finite")
        parts.append(values)
    return torch.from_numpy(np.concatenate(parts))


def _needed(name: str) -> str:
    if name == "reference":
        return "this loss compares with it: take it from learner.log_probs(data, reference=True)"
    if name == "advantages":
        return "this loss needs it: trimtab.advantages makes them of rewards"
    return "this loss needs it"


def _named(found: object) -> str:
    return f"of type {type(found).__name__}"


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
