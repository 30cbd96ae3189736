"""The rollout client: sends prompts to rollout workers and samples to reward models; returns ordered experience.
Evaluation asks it for samples on the prompts of --eval_dataset, scored by the training reward.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.algos.group_rewards import for_groups
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.prompts import PromptDataset
from trimtab.data.tokenizer import texts_of
from trimtab.distributed.launcher import EngineLost, Group
from trimtab.distributed.serialization import NotSerializable
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.evaluate.tail_risk import mean, rate
from trimtab.rewards.requests import PromptBatch, make_reward_request
from trimtab.rewards.types import RewardFailed, RewardResult, RewardSum
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.metrics import CLOCK_FIELDS
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_files import episode_figures, of_evaluation
from trimtab.train.rl.rollout_worker import FailedGroup, SampledGroups, rollout_too_large
from trimtab.train.rl.trainer import reward_models_too_large
from trimtab.train.update import InsufficientMemory

Request = tuple[int, int]  # row of the prompt data, seed


class RolloutClient:
    """The loop's side of rollout workers and reward models: samples of prompts with their rewards, in order."""

    def __init__(self, stores: dict[str, PromptDataset], tokenizer: Any, rollouts: Group, reward_models: Group | None):
        """`stores`: the prompts by name."""
        self.stores, self.tokenizer = stores, tokenizer
        self.replace_engine: Callable[[EngineLost], None] = _raised
        self.use(rollouts, reward_models)

    def use(self, rollouts: Group, reward_models: Group | None) -> None:
        self.rollouts, self.reward_models = rollouts, reward_models
        near = rollouts.call("describe")[0]
        found = [near] if reward_models is None else [reward_models.call("describe")[0], near]
        self.exact: bool = near["exact"]
        self.engine_exact: bool = near["engine_exact"]
        self.in_words = "; ".join(part["rewards_in_words"] for part in found if part["rewards"])
        self.reward_sum = RewardSum(
            [name for part in found for name in part["rewards"]], [w for part in found for w in part["weights"]]
        )
        self._near = bool(near["rewards"])
        self._columns = [] if reward_models is None else found[0]["columns"]
        self._texts = reward_models is not None and found[0]["texts"]

    def __call__(self, requests: Sequence[Request], store: str, sampling: SamplingParams) -> Experience | None:
        """Sample and score, without an environment, so that no group can fail. None: a stop was requested."""
        asked = self.ask(requests, store, sampling)
        assert asked is None or asked.experience is not None, "no environment is played"
        return None if asked is None else asked.experience

    def ask(self, requests: Sequence[Request], store: str, sampling: SamplingParams) -> SampledGroups | None:
        """Sample and score the prompts of a store; the result also lists failed groups. None: a stop was requested."""
        prompts = self.stores[store]
        with self.naming_rows(store):
            found = self._sampled(prompts, requests, sampling)
        if found is None:
            return None
        for group in found.failed:
            group.problem += f"; its prompt stands in {prompts.place(requests[group.prompt][0])}"
        if found.experience is not None:
            self.score(found.experience, found.results, store)
        return found

    def score(self, experience: Experience, results: Sequence[RewardResult], store: str) -> None:
        """Set the samples' rewards: `results` of the rewards near the engine, and scores of the reward models."""
        with self.naming_rows(store):
            scored = [*self._scored(self.stores[store], experience), *results]
            try:
                experience.reward(self.reward_sum.combined(scored, len(experience)))
            except RewardFailed as error:
                _name_row(error, experience.rows_S.tolist())
                raise

    @contextmanager
    def naming_rows(self, store: str) -> Iterator[None]:
        """Add the place in the data files to a RewardFailed that names a row."""
        try:
            yield
        except RewardFailed as error:
            if error.row is None:
                raise
            where = self.stores[store].place(error.row)
            raise type(error)(f"{error}; its prompt stands in {where}", error.row) from error

    def prompt_batch(self, requests: Sequence[Request], store: str) -> PromptBatch:
        return PromptBatch.of(self.stores[store], requests, rewarded=self._near)

    def _sampled(
        self, prompts: PromptDataset, requests: Sequence[Request], sampling: SamplingParams
    ) -> SampledGroups | None:
        """Deal prompts to all processes in turn, and put the returned groups in order."""
        size = self.rollouts.size
        shares = [list(range(rank, len(requests), size)) for rank in range(size)]
        asked = [PromptBatch.of(prompts, [requests[i] for i in share], rewarded=self._near) for share in shares]
        try:
            with serializing_prompts():
                parts = self._sample_with_retry(asked, sampling)
        except OutOfMemory as shortage:  # one of several processes has aborted the collectives of all
            self.rollouts.reinit_process_group()
            raise rollout_too_large(shortage) from shortage
        for part, share in zip(parts, shares):
            if isinstance(part, RewardFailed | InsufficientMemory):
                raise part
            if part is None and share:
                return None
        replies: list[tuple[SampledGroups, list[int]]] = [(part, share) for part, share in zip(parts, shares) if part]
        failed = [replace(group, prompt=share[group.prompt]) for part, share in replies for group in part.failed]
        whole = [(part.experience, part.results) for part, _ in replies if part.experience is not None]
        if not whole:
            return SampledGroups(None, [], failed)
        lost = {group.prompt for group in failed}
        places = [place for _, share in replies for place in share if place not in lost]
        experience = Experience.joined([own for own, _ in whole])
        results = [RewardResult.joined(part) for part in zip(*(own for _, own in whole))]
        samples = experience.samples_of(sorted(range(len(places)), key=places.__getitem__))
        if samples != list(range(len(experience))):
            experience, results = experience.take(samples), [result.take(samples) for result in results]
        return SampledGroups(experience, results, failed)

    def _sample_with_retry(self, asked: list[PromptBatch], sampling: SamplingParams) -> list[Any]:
        while True:
            try:
                return self.rollouts.call("sample", asked, sampling=sampling)
            except EngineLost as lost:
                self.replace_engine(lost)  # then all are called again: equal seeds give equal samples

    def _scored(self, prompts: PromptDataset, experience: Experience) -> list[RewardResult]:
        """Score all samples with every reward model; each process gets a contiguous part of equal length."""
        if self.reward_models is None:
            return []
        rows, size = experience.rows_S.tolist(), self.reward_models.size
        prompt_ids = [experience.prompt(i) for i in range(len(rows))]
        response_ids = [experience.response(i) for i in range(len(rows))]
        responses = texts_of(self.tokenizer, response_ids) if self._texts else [""] * len(rows)
        played = experience.episodes is not None
        openings = self.tokenizer.batch_decode(prompt_ids) if played else []
        request = make_reward_request(prompts, rows, responses, prompt_ids, response_ids, openings=openings)
        request = request.with_columns(self._columns)
        bounds = [len(rows) * rank // size for rank in range(size + 1)]
        shares = [range(start, end) for start, end in itertools.pairwise(bounds)]
        try:
            parts = self.reward_models.call("score", [request.take(share) for share in shares])
        except OutOfMemory as shortage:
            self.reward_models.reinit_process_group()
            raise reward_models_too_large(shortage) from shortage
        for part, share in zip(parts, shares):
            if isinstance(part, RewardFailed):
                _name_row(part, rows[share.start : share.stop])
                raise part
            if isinstance(part, InsufficientMemory):
                raise part
        return [RewardResult.joined(results) for results in zip(*parts)]


class EnvironmentFailed(RunFailed):
    """More groups of an iteration failed than --env_max_failed allows. The run's state is intact and can be saved."""


class Failures:
    """Counts the groups of one iteration whose environment or reward failed; too many of them end the run."""

    def __init__(self, options: RLOptions):
        self.options = options
        self.groups = self.unrewarded = 0
        self.episodes = self.rewards = 0  # for the metrics: a resumed run counts on

    def add(self, failed: Sequence[FailedGroup]) -> None:
        self.groups += len(failed)
        self.episodes += sum(group.episodes for group in failed)
        unrewarded = [group for group in failed if not group.episodes]
        self.unrewarded += len(unrewarded)
        self.rewards += len(unrewarded)
        options = self.options
        self._report([group for group in failed if group.episodes], options.environment_flag)
        self._report(unrewarded, "a reward")
        if self._too_many(unrewarded, self.unrewarded, options.failed_reward_share):
            raise RewardFailed(
                f"a reward failed for {self.unrewarded} of an iteration's {options.rollout_batch_size} groups, more "
                f"than the share of {options.failed_reward_share:g} that may be left out (--max_failed_rewards); the "
                f"last: {unrewarded[-1].problem}"
            )
        played = self.groups - self.unrewarded
        if len(failed) > len(unrewarded) and self._too_many(failed, played, options.env_max_failed):
            raise EnvironmentFailed(
                f"{options.environment_flag}: it failed for {played} of an iteration's {options.rollout_batch_size} "
                f"groups, more than the share of {options.env_max_failed:g} that may be left out (--env_max_failed); "
                f"the last: {failed[-1].problem}"
            )

    def _report(self, failed: Sequence[FailedGroup], what: str) -> None:
        if failed:
            more = f" (and {len(failed) - 1} more groups)" if len(failed) > 1 else ""
            print(f"left out, since {what} failed: {failed[0].problem}{more}", flush=True)

    def _too_many(self, failed: Sequence[FailedGroup], count: int, share: float) -> bool:
        # Even a small batch may lose one group; otherwise every flaky episode would end the run.
        return bool(failed) and count > max(share * self.options.rollout_batch_size, float(share > 0))

    def figures(self) -> dict[str, float]:
        figures = {"failed_episodes": float(self.episodes)} if self.options.plays else {}
        return figures | ({"failed_rewards": float(self.rewards)} if self.options.failed_reward_share else {})


@contextmanager
def serializing_prompts() -> Iterator[None]:
    """Turn an unserializable column of the prompt data into a UserError."""
    try:
        yield
    except NotSerializable as error:
        raise UserError(
            f"a column of the prompt data cannot be sent to another process ({error}); drop it, or train in one"
        ) from error


def _raised(lost: EngineLost) -> None:
    raise lost


def _name_row(error: RewardFailed, rows: Sequence[int]) -> None:
    """Replace the index of a sample by its row in the data."""
    if error.row is not None:
        error.row = rows[error.row]


# ---- evaluation

EVALUATION_SEED = 0x5EED  # the same random streams in every evaluation, so that two differ only by the policy


class Evaluation:
    """Figures of the policy on the evaluation prompts.

    pass_1    mean score of a sample           pass_n    mean over prompts of the best of n samples
    binary    every score is 0 or 1, so that the means are success rates

    Figures over all prompts have 95 % intervals, _low and _high, for the mean over new prompts.
    """

    def __init__(self, store: PromptDataset, sampling: SamplingParams, failed_share: float = 0.0):
        """`failed_share`: of the prompts, that may be left out because a reward failed."""
        self.store, self.sampling, self.failed_share = store, sampling, failed_share
        self.shown: Experience | None = None  # answers to the first prompts in the last evaluation

    def run(self, client: RolloutClient) -> dict[str, float] | None:
        """Figures over all prompts, and per data source if there are several. None: a stop was requested."""
        requests = [(row, request_seed(EVALUATION_SEED, row)) for row in range(len(self.store))]
        asked = client.ask(requests, "evaluation", self.sampling)
        if asked is None:
            return None
        if (experience := asked.experience) is None:
            if not asked.failed[0].episodes:
                raise RewardFailed(f"no prompt of the evaluation has its rewards; the first: {asked.failed[0].problem}")
            raise EnvironmentFailed(f"every episode of the evaluation has failed; the first: {asked.failed[0].problem}")
        unrewarded = [group for group in asked.failed if not group.episodes]
        share, prompts = self.failed_share, len(self.store)
        if len(unrewarded) > max(share * prompts, float(share > 0)):
            raise RewardFailed(
                f"a reward failed for {len(unrewarded)} of the evaluation's {prompts} prompts, more than the share of "
                f"{share:g} that may be left out (--max_failed_rewards); the last: {unrewarded[-1].problem}"
            )
        self.shown = of_evaluation(experience)
        n, firsts_E, groups_E = self.sampling.n, experience.firsts_E, experience.groups_E
        groups, scores_E = groups_E.numpy(), experience.scores_S[firsts_E]
        scores = scores_E.double().numpy()
        best = for_groups(lambda scores_GA: scores_GA.amax(1), groups_E, scores_E).double().numpy()
        figures = {"eval_length": float(experience.lengths_E.float().mean())}
        figures["eval_binary"] = bool(np.isin(scores, (0.0, 1.0)).all())
        figures |= with_interval("eval_reward", experience.answer_rewards_S[firsts_E].double().numpy(), groups)
        logs = {name: values for name, values in experience.logs.items() if f"reward/{name}" not in CLOCK_FIELDS}
        for name, values_S in logs.items():
            figures |= with_interval(f"eval_reward/{name}", values_S[firsts_E].double().numpy(), groups)
        figures |= with_interval("eval_pass_1", scores, groups)
        if n > 1:
            figures |= with_interval(f"eval_pass_{n}", best, np.arange(len(best)))
        if unrewarded:
            figures["eval_failed_rewards"] = float(len(unrewarded))
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
