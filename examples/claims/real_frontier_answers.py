"""What the models of real_frontier.py say to held-out prompts: reward, KL, P(bad) and CVaR, for prompts drawn anew."""

import math

import numpy as np
from real_frontier_methods import BEFORE

from trimtab.evaluate.tail_risk import rate

DRAWS, LEVEL = 400, 0.01


class Answers:
    """Of a run to the prompts of a split, or to all that were held out: [prompts, answers of each]."""

    def __init__(self, row: dict, split: str):
        prompts, group = len(row["splits"]), row["group"]
        chosen = np.array([split in (name, "all") for name in row["splits"]])

        def shaped(values: list[float]) -> np.ndarray:
            turns = np.asarray(values).reshape(-1, prompts, group)  # a turn asks every prompt
            return turns.transpose(1, 0, 2).reshape(prompts, -1)[chosen]

        self.method, self.weight, self.seed = row["method"], row["kl_weight"], row["seed"]
        self.group, self.rewards, self.kl = group, shaped(row["rewards"]), shaped(row["kl"])
        self.updates, self.beta, self.course = row.get("updates"), row.get("beta", 0.0), row.get("course", {})

    def figures(self, threshold: float, prompts: np.ndarray) -> dict[str, float]:
        rewards = self.rewards[prompts].ravel()
        worst = max(1, int(LEVEL * len(rewards)))
        bad = float((rewards < threshold).mean())
        return {
            "reward": float(rewards.mean()),
            "kl": float(self.kl[prompts].mean()),
            "bad": bad,
            # An answer more and half of it bad, so that none at all has a logarithm.
            "log_bad": math.log10((bad * len(rewards) + 0.5) / (len(rewards) + 1)),
            "cvar": float(np.partition(rewards, worst - 1)[:worst].mean()),
        }

    def bad(self, threshold: float) -> str:
        """How many, and their share with an interval that is not empty where there are none."""
        events = self.rewards < threshold
        return f"{events.sum()} = {percent(events)}"


def percent(events: np.ndarray) -> str:
    """Of events [prompts, answers]: the share with its 95 % interval for new prompts."""
    found = rate(events.ravel(), np.repeat(np.arange(len(events)), events.shape[1]))
    return f"{100 * found.value:.2f} % ({100 * found.low:.2f} to {100 * found.high:.2f})"


def threshold_of(rows: list[dict], share: float) -> float:
    """The reward that this share of the answers before training lies below, for prompts that are not reported."""
    before = next((row for row in rows if row.get("method") == BEFORE), None)
    if before is None:
        raise SystemExit("results.jsonl: without the model before training, which run measures, give --threshold")
    return round(float(np.quantile(Answers(before, "chosen_by").rewards, share)), 2)


def measured(rows: list[dict], split: str) -> list[Answers]:
    return [Answers(row, split) for row in rows if "rewards" in row and row["state"] == "done"]


def drawn(prompts: int) -> list[np.ndarray]:
    """The prompts themselves, then draws of as many."""
    generator = np.random.default_rng(0)
    return [np.arange(prompts), *(generator.integers(prompts, size=prompts) for _ in range(DRAWS))]


def bounds(values: list[float]) -> tuple[float, float, float]:
    """The first, and the 95 % interval of the others."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return values[0], float(low), float(high)
