"""What is to be said of an iteration's episodes, and of one for a person to read."""

from typing import Any

import numpy as np

from trimtab.rewards.types import EPISODE_LOGS
from trimtab.rollout.episode import Episode, Segment
from trimtab.train.rl.experience import FINISHES, Experience

ENDS = tuple(name for name in FINISHES if name not in ("abort", "failed"))  # of episodes that are learnt from
SLOWEST = 95  # percentile


def episode_figures(experience: Experience) -> dict[str, float]:
    """Means over episodes, each counted once, branches and all; nothing where no environment was played."""
    if experience.episodes is None:
        return {}
    episodes = [experience.episodes[i] for i in experience.firsts_E]
    figures = {name: _mean([episode.logs.get(name, 0.0) for episode in episodes]) for name in EPISODE_LOGS}
    figures["turns"] = _mean([len(episode.turns) for episode in episodes])
    figures["episode_length"] = float(experience.sequence_lengths_S[experience.lasts_E].float().mean())
    figures["branches"] = len(experience) / len(episodes)
    figures["begun_anew"] = float(sum(episode.begun - 1 for episode in episodes))
    finishes = [FINISHES[finish] for finish in experience.finishes_S[experience.lasts_E]]
    figures |= {f"finish/{name}": finishes.count(name) / len(finishes) for name in ENDS}
    seconds = [episode.logs.get("seconds_environment", 0.0) for episode in episodes]
    figures[f"seconds_environment_{SLOWEST}"] = float(np.percentile(seconds, SLOWEST))
    return figures


def turns(episode: Episode, characters: int) -> list[dict[str, Any]]:
    """Who said what, as rollouts.jsonl has it."""
    return [
        {
            "role": _role(said),
            "text": _text(said)[:characters],
            "tokens": said.end - said.start,
            "drawn": said.drawn,
            "reward": said.reward,
            "seconds": round(said.seconds, 4),
            **({"branch": said.branch} if said.branch else {}),
        }
        for said in episode.said
    ]


def _role(said: Segment) -> str:
    if said.drawn:
        return "assistant"
    return str(said.messages[0]["role"]) if said.messages else "environment"  # exact tokens have no messages


def _text(said: Segment) -> str:
    if said.drawn:
        return said.text
    return "\n".join(str(message.get("content") or "") for message in said.messages)


def _mean(values: list[float] | list[int]) -> float:
    return float(np.mean(values))
