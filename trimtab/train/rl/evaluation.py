"""Evaluation of the policy: samples on the prompts of --eval_dataset, scored by the training reward.

pass_1    mean score of a sample           pass_n    mean over prompts of the best of n samples
binary    every score is 0 or 1, so that the means are success rates

Figures over all prompts have 95 % intervals, _low and _high, for the mean over new prompts.
"""

import math

import numpy as np

from trimtab.algos.group_rewards import for_groups
from trimtab.data.prompts import PromptDataset
from trimtab.evaluate.tail_risk import mean, rate
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.metrics import CLOCK_FIELDS
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_client import EnvironmentFailed, RolloutClient
from trimtab.train.rl.rollout_files import episode_figures, of_evaluation

SEED = 0x5EED  # the same random streams in every evaluation, so that two differ only by the policy


class Evaluation:
    def __init__(self, store: PromptDataset, sampling: SamplingParams):
        self.store, self.sampling = store, sampling
        self.shown: Experience | None = None  # answers to the first prompts in the last evaluation

    def run(self, client: RolloutClient) -> dict[str, float] | None:
        """Figures over all prompts, and per data source if there are several. None: a stop was requested."""
        requests = [(row, request_seed(SEED, row)) for row in range(len(self.store))]
        asked = client.ask(requests, "evaluation", self.sampling)
        if asked is None:
            return None
        if (experience := asked.experience) is None:
            raise EnvironmentFailed(f"every episode of the evaluation has failed; the first: {asked.failed[0].problem}")
        self.shown = of_evaluation(experience)
        n, firsts_E, groups_E = self.sampling.n, experience.firsts_E, experience.groups_E
        groups, scores_E = groups_E.numpy(), experience.scores_S[firsts_E]
        scores = scores_E.double().numpy()
        best = for_groups(lambda scores_GA: scores_GA.amax(1), groups_E, scores_E).double().numpy()
        figures = {"eval_length": float(experience.lengths_E.float().mean())}
        figures["eval_binary"] = bool(np.isin(scores, (0.0, 1.0)).all())
        figures |= with_interval("eval_reward", experience.answer_rewards_S[firsts_E].double().numpy(), groups)
        for name, values_S in experience.logs.items():
            figures |= with_interval(f"eval_reward/{name}", values_S[firsts_E].double().numpy(), groups)
        figures |= with_interval("eval_pass_1", scores, groups)
        if n > 1:
            figures |= with_interval(f"eval_pass_{n}", best, np.arange(len(best)))
        if experience.episodes is not None:
            figures["eval_failed_episodes"] = float(sum(group.episodes for group in asked.failed))
            found = episode_figures(experience)
            figures |= {f"eval_{name}": value for name, value in found.items() if name not in CLOCK_FIELDS}
        answered = experience.rows_S[experience.firsts_G].tolist()  # all prompts unless an environment failed
        sources = np.array([self.store.source(row) for row in answered])
        for source in dict.fromkeys(sources.tolist()) if len(set(sources)) > 1 else ():
            chosen = sources == source
            figures[f"eval_{source}_pass_1"] = float(scores[chosen[groups]].mean())
            if n > 1:
                figures[f"eval_{source}_pass_{n}"] = float(best[chosen].mean())
        return figures


def with_interval(name: str, values: np.ndarray, prompts: np.ndarray) -> dict[str, float]:
    """The mean over answers and its 95 % interval for new prompts; `prompts`: the prompt of each answer. NaN values (a
    reward part that does not apply to an answer) are left out."""
    known = ~np.isnan(values)
    if not known.any():
        return {}
    values, prompts = values[known], prompts[known]
    found = rate(values == 1, prompts) if np.isin(values, (0.0, 1.0)).all() else mean(values, prompts)
    bounds = {f"{name}_low": found.low, f"{name}_high": found.high}
    return {name: found.value} | (bounds if math.isfinite(found.low) else {})
