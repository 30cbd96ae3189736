"""Prompt batches: prompts with the columns that rewards and environments read, as reward requests and tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from trimtab.data.prompts import PromptStore
from trimtab.rewards.types import RewardRequest
from trimtab.rollout.episode import Episode, Task

SEED_BITS = 2**31 - 1  # of an environment's seed: numpy takes no negative one, others none of 64 bits


class Rows(Protocol):
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
    def of(cls, store: PromptStore, requests: Sequence[tuple[int, int]], *, rewarded: bool) -> "PromptBatch":
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
    store: Rows,
    rows: Sequence[int],
    responses: Sequence[str],
    prompt_ids: Sequence[list[int]],
    response_ids: Sequence[list[int]],
    episodes: Sequence[Episode] = (),
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
