"""How good is the policy? Samples on held-out prompts, scored by the same reward.

pass_1    mean score of a sample           pass_n    mean over prompts of the best of n samples
"""

from collections.abc import Sequence

from trimtab.data.prompts import PromptStore
from trimtab.distributed.roles import Group
from trimtab.rollout.builtin.sampler import request_seed
from trimtab.rollout.types import Sampling
from trimtab.train.rl.asking import ask_for_samples

SEED = 0x5EED  # the same samples' streams in every evaluation, so that two differ by the policy alone


class Evaluation:
    def __init__(self, store: PromptStore, sampling: Sampling):
        self.store, self.sampling = store, sampling

    def run(self, rollouts: Group) -> dict[str, float] | None:
        """Figures over all prompts, and over those of each data source where there are several. None: the answers were
        given up."""
        requests = [(row, request_seed(SEED, row)) for row in range(len(self.store))]
        experience = ask_for_samples(rollouts, requests, "evaluation", self.sampling)
        if experience is None:
            return None
        n = self.sampling.n
        scores_PN, rewards_PN = experience.scores_S.view(-1, n), experience.answer_rewards_S.view(-1, n)
        figures = {"eval_reward": float(rewards_PN.mean()), "eval_length": float(experience.lengths_S.float().mean())}
        figures |= _passes(scores_PN, range(len(self.store)), "eval_")
        sources = [self.store.source(row) for row in range(len(self.store))]
        for source in dict.fromkeys(sources) if len(set(sources)) > 1 else ():
            rows = [row for row, name in enumerate(sources) if name == source]
            figures |= _passes(scores_PN, rows, f"eval_{source}_")
        return figures


def _passes(scores_PN, rows: Sequence[int], prefix: str) -> dict[str, float]:
    scores_PN = scores_PN[list(rows)]
    n = scores_PN.shape[1]
    figures = {f"{prefix}pass_1": float(scores_PN.mean())}
    if n > 1:
        figures[f"{prefix}pass_{n}"] = float(scores_PN.amax(1).mean())
    return figures
