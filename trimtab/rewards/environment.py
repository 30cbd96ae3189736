"""What an environment itself gives for an episode: the rewards of all turns, and that of the whole."""

import math

from trimtab.rewards.types import RewardRequest, RewardResult

NAME = "environment"
OF_PLAYING = (
    *("tool_calls", "tool_failures", "unknown_tools", "seconds_environment"),
    *("turns", "episode_length", "branches"),
)
"""Figures that an episode has from whoever played it; all others are the environment's own."""


class EnvironmentReward:
    name = NAME
    concurrent = True

    def __init__(self, source: str):
        """`source`: what it is called in the options."""
        self.source = source

    def __str__(self) -> str:
        return f"{NAME} {self.source}"

    def __call__(self, request: RewardRequest) -> RewardResult:
        episodes = request.episodes
        assert len(episodes) == len(request), "an environment was played"
        names = dict.fromkeys(name for episode in episodes for name in episode.logs if name not in OF_PLAYING)
        logs = {name: [episode.logs.get(name, math.nan) for episode in episodes] for name in names}
        return RewardResult([episode.reward for episode in episodes], logs=logs)

    def close(self) -> None:
        """Its processes belong to whoever plays."""
