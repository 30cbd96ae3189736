"""Limits of episodes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlaySettings:
    max_turns: int = 16
    episode_max_len: int | None = None  # tokens from the prompt to the end; None: the engine's context
    observation_max_len: int | None = None  # tokens of what the world says at a time; None: no limit
    retries: int = 2  # times that an episode begins anew whose environment has failed
    history: Literal["append", "template"] = "append"
    plain: bool = False  # prompts are texts that no chat template has rendered
