"""How good is the policy? Samples on the prompts of --eval_dataset, scored by the same reward.

pass_1    mean score of a sample           pass_n    mean over prompts of the best of n samples
binary    every score is 0 or 1: then, and only then, they are rates of success

Figures over all prompts have 95 % intervals, _low and _high, which speak of new prompts.
"""

import math

import numpy as np

from trimtab.data.prompts import PromptStore
from trimtab.distributed.roles import Group
from trimtab.evaluate.tail_risk import mean, rate
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.types import Sampling
from trimtab.train.rl.asking import ask_for_samples
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.samples import of_evaluation

SEED = 0x5EED  # the same samples' streams in every evaluation, so that two differ by the policy alone


class Evaluation:
    def __init__(self, store: PromptStore, sampling: Sampling):
        self.store, self.sampling = store, sampling
        self.shown: Experience | None = None  # of the last evaluation: the answers to its first prompts

    def run(self, rollouts: Group) -> dict[str, float] | None:
        """Figures over all prompts, and over those of each data source where there are several. None: the answers were
        given up."""
        requests = [(row, request_seed(SEED, row)) for row in range(len(self.store))]
        experience = ask_for_samples(rollouts, requests, "evaluation", self.sampling)
        if experience is None:
            return None
        n = self.sampling.n
        self.shown = of_evaluation(experience, n)
        scores_GA = experience.scores_S.view(-1, n).double().numpy()
        figures = {"eval_length": float(experience.lengths_S.float().mean())}
        figures["eval_binary"] = bool(np.isin(scores_GA, (0.0, 1.0)).all())
        figures |= with_interval("eval_reward", experience.answer_rewards_S.view(-1, n).double().numpy())
        for name, values_S in experience.logs.items():
            figures |= with_interval(f"eval_reward/{name}", values_S.view(-1, n).double().numpy())
        figures |= with_interval("eval_pass_1", scores_GA)
        if n > 1:
            figures |= with_interval(f"eval_pass_{n}", scores_GA.max(axis=1, keepdims=True))
        sources = np.array([self.store.source(row) for row in range(len(self.store))])
        for source in dict.fromkeys(sources.tolist()) if len(set(sources)) > 1 else ():
            chosen_GA = scores_GA[sources == source]
            figures[f"eval_{source}_pass_1"] = float(chosen_GA.mean())
            if n > 1:
                figures[f"eval_{source}_pass_{n}"] = float(chosen_GA.max(axis=1).mean())
        return figures


def with_interval(name: str, values_GA: np.ndarray) -> dict[str, float]:
    """The mean over answers and its 95 % interval for new prompts; a part that does not apply to an answer is NaN."""
    known_GA = ~np.isnan(values_GA)
    if not known_GA.any():
        return {}
    values, prompts = values_GA[known_GA], np.nonzero(known_GA)[0]
    found = rate(values == 1, prompts) if np.isin(values, (0.0, 1.0)).all() else mean(values, prompts)
    bounds = {f"{name}_low": found.low, f"{name}_high": found.high}
    return {name: found.value} | (bounds if math.isfinite(found.low) else {})
