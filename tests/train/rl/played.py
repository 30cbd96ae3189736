"""Episodes with an environment, written out: what the model drew, what the world said, what each turn was worth."""

from dataclasses import dataclass, field

import numpy as np

from trimtab.rewards.types import RewardResult
from trimtab.rollout.episode import EpisodeRecord, Segment
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience

WORLD = [30, 31]  # what the world says between two turns


@dataclass
class Played:
    """An episode: its turns as (tokens, reward), and which of them begin a branch."""

    turns: list[tuple[list[int], float]]
    last_reward: float = 0.0
    other_reward: float = 0.0  # from elsewhere
    branches: list[int] = field(default_factory=list)
    finish: str = "stop"

    @property
    def reward(self) -> float:
        return sum(reward for _, reward in self.turns) + self.last_reward + self.other_reward

    def rollouts(self, group: int, sample: int, prompt: list[int], log_prob: float = -1.0) -> list[Trajectory]:
        """A branch has everything before it, of which it drew nothing."""
        record = EpisodeRecord(last_reward=self.last_reward, opening=[{"role": "user", "content": "?"}])
        found: list[tuple[list[int], list[bool]]] = [([], [])]
        for number, (tokens, reward) in enumerate(self.turns):
            ids, drawn = found[-1]
            if number in self.branches:
                ids, drawn = [*ids[::-1], *WORLD], [False] * (len(ids) + len(WORLD))  # rewritten
                found.append((ids, drawn))
            elif number:
                ids += WORLD
                drawn += [False] * len(WORLD)
                record.said.append(Segment([{"role": "user", "content": "~"}], len(ids) - len(WORLD), len(ids), False))
            start = len(ids)
            ids += tokens
            drawn += [True] * len(tokens)
            own = {"text": "!", "finish": "stop", "reward": reward, "branch": len(found) - 1}
            record.said.append(Segment([{"role": "assistant", "content": "!"}], start, len(ids), True, **own))
        rollouts = []
        for branch, (ids, drawn) in enumerate(found):
            log_probs = np.full(sum(drawn), log_prob, dtype=np.float32)
            own = {"drawn": np.array(drawn, dtype=bool), "episode": record, "branch": branch}
            versions = np.zeros(sum(drawn), dtype=np.int32)
            rollouts.append(Trajectory(group, sample, prompt, ids, log_probs, self.finish, versions=versions, **own))
        return rollouts


def experience_of(groups: list[list[Played]], prompts: list[list[int]] | None = None) -> Experience:
    prompts = prompts or [[5, 6, 7 + group] for group in range(len(groups))]
    rollouts, rewards = [], []
    for group, episodes in enumerate(groups):
        for sample, episode in enumerate(episodes):
            branches = episode.rollouts(group, sample, prompts[group])
            rollouts += branches
            rewards += [episode.reward] * len(branches)
    return Experience.of([r.prompt for r in rollouts], rollouts, RewardResult(rewards))
