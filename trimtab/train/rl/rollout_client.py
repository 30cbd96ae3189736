"""Prompts out to the rollout role, answers to the reward models, an experience back in order: wherever they work."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore
from trimtab.data.tokenizer import texts_of
from trimtab.distributed.launcher import EngineLost, Group
from trimtab.distributed.serialization import NotSerializable
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.rewards.requests import PromptBatch, make_reward_request
from trimtab.rewards.types import RewardFailed, RewardResult, RewardSum
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.micro_batch_limit import NoRoom
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_worker import Answers, Failed, Replied, rollout_too_large
from trimtab.train.rl.trainer import reward_models_too_large

Request = tuple[int, int]  # row of the prompt data, seed


class RolloutClient:
    """Whom the loop asks for answers to prompts."""

    def __init__(self, stores: dict[str, PromptStore], tokenizer: Any, rollouts: Group, reward_models: Group | None):
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
        self.weighing = RewardSum(
            [name for part in found for name in part["rewards"]], [w for part in found for w in part["weights"]]
        )
        self._near = bool(near["rewards"])
        self._columns = [] if reward_models is None else found[0]["columns"]
        self._texts = reward_models is not None and found[0]["texts"]

    def __call__(self, requests: Sequence[Request], store: str, sampling: SamplingParams) -> Experience | None:
        """The answers to prompts of a store and their rewards, where nothing can fail. None: they were given up."""
        asked = self.ask(requests, store, sampling)
        assert asked is None or asked.experience is not None, "no environment is played"
        return None if asked is None else asked.experience

    def ask(self, requests: Sequence[Request], store: str, sampling: SamplingParams) -> "Asked | None":
        """The same with what has failed."""
        with self.placed(store):
            replied = self._answers(self.stores[store], requests, sampling)
        if replied is None:
            return None
        failed = [
            f"{words}; its prompt stands in {self.stores[store].place(requests[prompt][0])}"
            for prompt, words in zip(replied.failed.prompts, replied.failed.words)
        ]
        experience = None if replied.answers is None else self.judged(replied.answers, store)
        return Asked(experience, failed, replied.failed.episodes)

    def judged(self, answers: Answers, store: str) -> Experience:
        """With their rewards: what those near the engine have said, and what the reward models say now."""
        experience = answers.experience
        with self.placed(store):
            scored = [*self._scored(self.stores[store], experience), *answers.results]
            try:
                experience.reward(self.weighing.combined(scored, len(experience)))
            except RewardFailed as error:
                _name_row(error, experience.rows_S.tolist())
                raise
        return experience

    @contextmanager
    def placed(self, store: str) -> Iterator[None]:
        """A complaint about a row says where in the data that stands."""
        try:
            yield
        except RewardFailed as error:
            if error.row is None:
                raise
            where = self.stores[store].place(error.row)
            raise type(error)(f"{error}; its prompt stands in {where}", error.row) from error

    def questions(self, requests: Sequence[Request], store: str) -> PromptBatch:
        return PromptBatch.of(self.stores[store], requests, rewarded=self._near)

    def _answers(self, prompts: PromptStore, requests: Sequence[Request], sampling: SamplingParams) -> Replied | None:
        """Prompts dealt out to all processes in turn."""
        size = self.rollouts.size
        shares = [list(range(rank, len(requests), size)) for rank in range(size)]
        asked = [PromptBatch.of(prompts, [requests[i] for i in share], rewarded=self._near) for share in shares]
        try:
            with travelling():
                parts = self._called(asked, sampling)
        except OutOfMemory as shortage:  # one of several processes has called off what all were doing
            self.rollouts.reinit_process_group()
            raise rollout_too_large(shortage) from shortage
        for part, share in zip(parts, shares):
            if isinstance(part, RewardFailed | NoRoom):
                raise part
            if part is None and share:
                return None
        replies: list[tuple[Replied, list[int]]] = [(part, share) for part, share in zip(parts, shares) if part]
        failed = Failed(
            [share[prompt] for part, share in replies for prompt in part.failed.prompts],
            [words for part, _ in replies for words in part.failed.words],
            sum(part.failed.episodes for part, _ in replies),
        )
        found = [part.answers for part, _ in replies if part.answers is not None]
        if not found:
            return Replied(None, failed)
        places = [place for _, share in replies for place in share if place not in failed.prompts]
        return Replied(_in_order(found, places), failed)

    def _called(self, asked: list[PromptBatch], sampling: SamplingParams) -> list[Any]:
        while True:
            try:
                return self.rollouts.call("sample", asked, sampling=sampling)
            except EngineLost as lost:
                self.replace_engine(lost)  # then all are asked again: the same seeds give the same answers

    def _scored(self, prompts: PromptStore, experience: Experience) -> list[RewardResult]:
        """What every reward model says of the answers, dealt out in runs of equal length."""
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
            if isinstance(part, NoRoom):
                raise part
        return [RewardResult.joined(results) for results in zip(*parts)]


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


@dataclass
class Asked:
    """What came of prompts."""

    experience: Experience | None  # None: nothing is left
    failed: list[str]  # of every group that is left out, why
    failed_episodes: int = 0


def _in_order(found: Sequence[Answers], places: Sequence[int]) -> Answers:
    """Answers of several processes as those of one; `places`: of all their groups, in the order of the whole."""
    joined = Experience.joined([part.experience for part in found])
    samples = joined.samples_of(sorted(range(len(places)), key=places.__getitem__))
    if samples == list(range(len(joined))):
        return Answers(joined, [RewardResult.joined(part) for part in zip(*(part.results for part in found))])
    results = [RewardResult.joined(part).take(samples) for part in zip(*(part.results for part in found))]
    return Answers(joined.take(samples), results)


@contextmanager
def travelling() -> Iterator[None]:
    """Inside, prompts go to other processes with the columns of their rows."""
    try:
        yield
    except NotSerializable as error:
        raise UserError(
            f"a column of the prompt data cannot be sent to another process ({error}); drop it, or train in one"
        ) from error


def _raised(lost: EngineLost) -> None:
    raise lost


def _name_row(error: RewardFailed, rows: Sequence[int]) -> None:
    """Turn the number of a sample into that of its row of the data."""
    if error.row is not None:
        error.row = rows[error.row]
