"""Environments that fail, retries and all: their groups are left out and counted, and too many of them end the run."""

from collections.abc import Sequence

from trimtab.config.jobs import RLOptions
from trimtab.errors import RunFailed


class EnvironmentFailed(RunFailed):
    """More groups of an iteration are left out than may be. What the run holds is whole and can be saved."""


class Failures:
    """Of one iteration."""

    def __init__(self, options: RLOptions):
        self.options = options
        self.groups = self.episodes = 0

    def add(self, words: Sequence[str], episodes: int) -> None:
        """`words`: why each of these groups is left out; `episodes`: how many failed in them."""
        if not words:
            return
        self.groups += len(words)
        self.episodes += episodes
        options = self.options
        print(f"left out, since {options.environment_flag} failed: {words[0]}{_and_more(words)}", flush=True)
        # A small batch may lose one, or every flaky episode would end the run.
        if self.groups > max(options.env_max_failed * options.rollout_batch_size, float(options.env_max_failed > 0)):
            raise EnvironmentFailed(
                f"{options.environment_flag}: {self.groups} groups of an iteration had to be left out, and "
                f"{options.env_max_failed:g} of its {options.rollout_batch_size} may (--env_max_failed); the last: "
                f"{words[-1]}"
            )

    def figures(self) -> dict[str, float]:
        return {"failed_episodes": float(self.episodes)} if self.options.plays else {}


def _and_more(words: Sequence[str]) -> str:
    return f" (and {len(words) - 1} more groups)" if len(words) > 1 else ""
