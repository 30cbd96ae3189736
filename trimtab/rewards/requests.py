"""Reward requests: prompt batches with the columns that rewards and environments read, and the queue of requests.

One thread scores finished samples, in parts; results come back in the order of submission. A reward that runs a model
in this process must not compute at the same time as another model (`concurrent` is false): it is called when its
results are taken.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

from trimtab.data.prompts import PromptDataset
from trimtab.distributed.supervision import own_heartbeat
from trimtab.rewards.types import RewardRequest
from trimtab.rollout.episode import EpisodeRecord, Task

SEED_BITS = 2**31 - 1  # of an environment's seed: numpy takes no negative one, others none of 64 bits


class PromptRows(Protocol):
    """Prompts and the other columns of their rows."""

    @property
    def input_key(self) -> str: ...

    def text(self, index: int, /) -> str: ...

    def prompt(self, index: int, /) -> str | list[dict[str, Any]]: ...

    def label(self, index: int, /) -> Any: ...

    def columns(self, index: int, /) -> dict[str, Any]: ...


@dataclass
class PromptBatch:
    """Prompts on their way to a rollout worker, with the columns that rewards and environments there read."""

    rows: list[int]  # of the store
    seeds: list[int]
    ids: list[list[int]]
    input_key: str
    texts: list[str] = field(default_factory=list)  # the rest is empty where no reward reads it
    prompts: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, store: PromptDataset, requests: Sequence[tuple[int, int]], *, rewarded: bool) -> "PromptBatch":
        """`requests`: row and seed of each; `rewarded`: with their columns."""
        rows, seeds = [row for row, _ in requests], [seed for _, seed in requests]
        questions = cls(rows, seeds, [store.ids(row) for row in rows], store.input_key)
        if rewarded:
            questions.texts = [store.text(row) for row in rows]
            questions.prompts = [store.prompt(row) for row in rows]
            questions.labels = [store.label(row) for row in rows]
            questions.others = [store.columns(row) for row in rows]
        return questions

    def take(self, index: int) -> "PromptBatch":
        """A batch of one of them."""
        lists = {f.name: getattr(self, f.name)[index : index + 1] for f in fields(self) if f.name != "input_key"}
        return PromptBatch(input_key=self.input_key, **lists)

    def tasks(self) -> list[Task]:
        """The task of an environment for each of them."""
        return [
            Task(row, 0, seed & SEED_BITS, prompt, label, others, text)
            for row, seed, prompt, label, others, text in zip(
                self.rows, self.seeds, self.prompts, self.labels, self.others, self.texts, strict=True
            )
        ]

    def text(self, index: int, /) -> str:
        return self.texts[index]

    def prompt(self, index: int, /) -> Any:
        return self.prompts[index]

    def label(self, index: int, /) -> Any:
        return self.labels[index]

    def columns(self, index: int, /) -> dict[str, Any]:
        return self.others[index]


def make_reward_request(
    store: PromptRows,
    rows: Sequence[int],
    responses: Sequence[str],
    prompt_ids: Sequence[list[int]],
    response_ids: Sequence[list[int]],
    episodes: Sequence[EpisodeRecord] = (),
    openings: Sequence[str] = (),
) -> RewardRequest:
    """The request for one answer a row, with all columns of the row. `openings`: the texts with which environments
    opened in place of the prompts."""
    prompts, given = list(openings) or [store.text(row) for row in rows], [store.prompt(row) for row in rows]
    conversations = [prompt for prompt in given if isinstance(prompt, list) and not openings]
    columns = [store.columns(row) for row in rows]
    names = dict.fromkeys(name for row in columns for name in row)
    return RewardRequest(
        queries=[prompt + response for prompt, response in zip(prompts, responses)],
        prompts=prompts,
        responses=list(responses),
        labels=[store.label(row) for row in rows],
        columns={name: [row.get(name) for row in columns] for name in names} | {store.input_key: given},
        prompt_ids=list(prompt_ids),
        response_ids=response_ids,
        conversations=conversations if len(conversations) == len(given) else [],
        episodes=list(episodes),
    )


# ---- the queue of rewards that are computed while other samples are still being generated


Part = TypeVar("Part", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Scorer(Protocol[Part, Result]):
    """A reward, or several."""

    @property
    def concurrent(self) -> bool: ...

    def __call__(self, part: Part, /) -> Result: ...


class RewardQueue(Generic[Part, Result]):
    """For one iteration of a loop: `submit` each finished group, then take `results`.

    with RewardQueue(reward) as rewards:
        for group in engine:
            rewards.submit(make_reward_request(group))
        for result in rewards.results(): ...
    """

    def __init__(self, reward: Scorer[Part, Result]):
        self.reward = reward
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards") if reward.concurrent else None
        self._parts: list[Part] = []
        self._running: list[Future[Result]] = []
        self._failed: BaseException | None = None

    def __enter__(self) -> "RewardQueue[Part, Result]":
        return self

    def __exit__(self, *error: object) -> None:
        """Parts that have not begun are dropped; the one that has is not waited for, as it may take long."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(self, request: Part) -> None:
        """Add finished samples. Raises the error of an earlier part, so that generation stops."""
        self.check()
        self.add(request)

    def add(self, request: Part) -> None:
        """As `submit`, without raising, for a caller that must tell other processes before it stops (`failed`)."""
        if self._thread is None:
            self._parts.append(request)
            return
        part = self._thread.submit(self.reward, request)
        part.add_done_callback(self._look_at)
        self._running.append(part)

    @property
    def failed(self) -> bool:
        return self._failed is not None

    def check(self) -> None:
        """Raise the error of a part that has failed."""
        if self._failed is not None:
            raise self._failed

    def results(self) -> Iterator[Result]:
        """The result of every part, in the order of submission; the first failure is raised in its place."""
        if self._thread is None:
            yield from map(self.reward, self._parts)
        else:
            for part in self._running:
                with own_heartbeat.waiting():  # rewards have their own timeouts
                    result = part.result()
                yield result

    def _look_at(self, part: Future[Result]) -> None:
        if not part.cancelled() and self._failed is None:
            self._failed = part.exception()
