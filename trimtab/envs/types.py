"""The interface of an environment: `reset` begins an episode, `step` answers the policy's turns. Both may be async."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trimtab.rollout.episode import VERBATIM as VERBATIM
from trimtab.rollout.episode import Message as Message
from trimtab.rollout.episode import Task as Task


@dataclass(frozen=True)
class Turn:
    """A turn of the policy: the action that an environment is given."""

    text: str  # without its stop token
    message: Message  # with its tool calls
    ids: list[int]
    finish: Literal["stop", "length"]
    number: int  # 0 is the episode's first
    room: int  # tokens left in the episode


@dataclass
class Step:
    """An environment's answer to a turn: the observation, the reward, and whether the episode is over."""

    messages: str | list[Message] = field(default_factory=list)  # the observation; a str is one user message
    reward: float = 0.0  # of this turn
    done: bool = False  # terminated, in Gymnasium's words
    truncated: bool = False  # ended by a limit
    ids: list[int] | None = None  # exact tokens of the observation, instead of messages
    sampling: dict[str, Any] | None = None  # of the next turn: max_new_tokens, stop_strings
    logs: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One instance, one episode at a time."""

    tools: Sequence[Callable[..., Any]] = ()  # their schemas come from signatures and docstrings

    def reset(self, task: Task) -> str | list[Message] | None:
        """Begin an episode. Returns the first observation; None: the row's prompt."""

    def step(self, turn: Turn) -> Step: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EpisodeSettings:
    """Limits of episodes, and how their tokens are made."""

    max_turns: int = 16
    episode_max_len: int | None = None  # tokens from the prompt to the end; None: the engine's context
    observation_max_len: int | None = None  # tokens of an observation; None: no limit
    retries: int = 2  # how often an episode is begun anew after its environment has failed
    history: Literal["append", "template"] = "append"
    plain: bool = False  # prompts are texts that no chat template has rendered
