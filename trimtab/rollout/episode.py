"""Tasks and episode records: messages, rewards and token ranges of every turn. Tokens are in the trajectory.

A record is what a person reads, and what a new instance of the environment needs to be replayed to the same state.
"""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # role, content, and where they apply: tool_calls, tool_call_id, name

VERBATIM = "verbatim"
"""The role of a text that no chat template formats: it is tokenized as it is."""


@dataclass(frozen=True)
class Task:
    """One episode of one row. All samples of a group have the same environment seed, so that they begin alike; the
    policy samples each with its own random stream."""

    row: int  # of the prompt data
    sample: int  # which of the row's episodes
    seed: int  # made of the run's seed and the row's place in the data
    prompt: str | list[Message] = ""
    label: Any = None
    columns: dict[str, Any] = field(default_factory=dict)  # everything else that the row has
    text: str | None = None  # the prompt as the policy reads it, if that is known

    @property
    def asked(self) -> list[Message]:
        """The prompt as messages."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


@dataclass
class Segment:
    """A turn of the model, or an observation."""

    messages: list[Message]
    start: int  # its tokens in the sequence of its branch, counted after the prompt
    end: int
    drawn: bool  # by the model; tokens between turns are the template's
    text: str = ""
    finish: str = ""  # of a turn of the model: stop or length
    reward: float = 0.0  # of a turn of the model
    seconds: float = 0.0  # that the engine or the environment took
    branch: int = 0


@dataclass
class EpisodeRecord:
    said: list[Segment] = field(default_factory=list)
    opening: list[Message] | None = None  # what reset gave, if it did
    last_reward: float = 0.0  # of the whole episode, added to those of its turns
    logs: dict[str, float] = field(default_factory=dict)  # metrics of the environment
    begun: int = 1  # attempts: again if an environment failed, or its replay differed
    problem: str | None = None  # why it failed, in the environment's words

    @property
    def reward(self) -> float:
        return sum(said.reward for said in self.said) + self.last_reward

    @property
    def turns(self) -> list[Segment]:
        """Turns of the model."""
        return [said for said in self.said if said.drawn]

    def plain(self) -> dict[str, Any]:
        """As a JSON object; values are not copied."""
        return {**vars(self), "said": [dict(vars(said)) for said in self.said]}

    @classmethod
    def of_plain(cls, found: dict[str, Any]) -> "EpisodeRecord":
        return cls(**{**found, "said": [Segment(**said) for said in found["said"]]})
