"""What comes back from environments, each of one episode."""

from dataclasses import dataclass, field
from typing import Any

from trimtab.envs.types import Message, Step


@dataclass(frozen=True)
class Opened:
    episode: int
    messages: list[Message] | None  # None: the row's own prompt
    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas
    seconds: float = 0.0


@dataclass(frozen=True)
class Stepped:
    episode: int
    step: Step
    tool_calls: int = 0
    tool_failures: int = 0
    unknown_tools: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended:
    episode: int
    reward: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Broken:
    episode: int
    words: str
    innocent: bool = False  # its process was ended for another one's sake


Reply = Opened | Stepped | Ended | Broken


def reply_of(found: dict[str, Any], episode: int) -> Reply:
    """Of what a worker says, which has its own numbers for episodes."""
    kind, values = found["kind"], found["values"]
    if kind == "opened":
        return Opened(episode, **values)
    if kind == "stepped":
        return Stepped(episode, **values | {"step": Step(**values["step"])})
    if kind == "ended":
        return Ended(episode, **values)
    assert kind == "broken", kind
    return Broken(episode, **values)
