"""The record of an episode: who said what, and what it was worth. It holds what a person reads and what another
instance of the environment must be played to be where this one was; tokens lie beside it."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # role, content, and where they apply: tool_calls, tool_call_id, name

VERBATIM = "verbatim"
"""The role of a text that stands as it is: it is tokenised alone, and marks of a chat template are its author's."""


@dataclass(frozen=True)
class Task:
    """One episode of one row. All samples of a group have one seed, so that they begin alike; what the policy draws in
    them, it draws from streams of their own."""

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
class Said:
    """A turn of the model, or what the world said to it."""

    messages: list[Message]
    start: int  # its tokens in the sequence of its branch, counted from behind the prompt
    end: int
    drawn: bool  # by the model; what stands between the runs of drawn tokens is the template's
    text: str = ""
    finish: str = ""  # of a turn of the model: stop or length
    reward: float = 0.0  # of a turn of the model
    seconds: float = 0.0  # that the engine or the environment took
    branch: int = 0


@dataclass
class Episode:
    said: list[Said] = field(default_factory=list)
    opening: list[Message] | None = None  # what reset gave, if it did
    last_reward: float = 0.0  # of the episode as a whole, beside those of its turns
    logs: dict[str, float] = field(default_factory=dict)  # figures of its own
    begun: int = 1  # times from nothing: again where an environment failed, or answered another instance otherwise
    problem: str | None = None  # why it failed, in the environment's words

    @property
    def reward(self) -> float:
        return sum(said.reward for said in self.said) + self.last_reward

    @property
    def turns(self) -> list[Said]:
        """Those of the model."""
        return [said for said in self.said if said.drawn]

    def plain(self) -> dict[str, Any]:
        """As JSON holds it; what lies inside is not copied."""
        return {**vars(self), "said": [dict(vars(said)) for said in self.said]}

    @classmethod
    def of_plain(cls, found: dict[str, Any]) -> "Episode":
        return cls(**{**found, "said": [Said(**said) for said in found["said"]]})
