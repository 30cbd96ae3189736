"""The role that answers prompts and has the answers scored: an engine on the policy's own weights, and a reward.

Samples go to the reward as they finish, while others are still being written. Every process answers its own share.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.data.prompts import PromptStore
from trimtab.errors import OutOfMemory
from trimtab.rewards.overlap import Overlapped
from trimtab.rewards.requests import request_of
from trimtab.rewards.types import Reward, RewardFailed, RewardRequest, RewardResult
from trimtab.rewards.waiting import GivenUp
from trimtab.rollout.engine import Engine
from trimtab.rollout.types import Rollout, Sampling
from trimtab.train.pass_limit import NoRoom, memory_guard
from trimtab.train.rl.experience import Experience

Request = tuple[int, int]  # row of the prompt data, seed
ROLLOUT_FLAGS = "lower --rollout_slots, --rollout_kv_tokens, --generate_max_len or --micro_rollout_batch_size"
SCORED_AT_ONCE = 64  # finished samples that go to a reward together while others are being written


class Rollouts:
    def __init__(
        self,
        engine: Engine,
        reward: Reward,
        stores: dict[str, PromptStore],
        tokenizer: Any,
        stopped: Callable[[], bool],
    ):
        """`stores`: the prompts by name (train, evaluation); `stopped`: whether to give up what is being written."""
        self.engine, self.reward, self.stores = engine, reward, stores
        self.tokenizer, self.stopped = tokenizer, stopped

    def sample(
        self, requests: list[Request], *, store: str, sampling: Sampling
    ) -> Experience | RewardFailed | NoRoom | None:
        """The answers to these prompts and their rewards, in order. None: there were none, or it was given up. A
        failed reward, or a lack of memory, is handed back, not raised: all processes can then still write a
        checkpoint."""
        try:
            with memory_guard():
                return self._sample(requests, self.stores[store], sampling)
        except RewardFailed as failure:
            return failure
        except GivenUp:
            return None
        except OutOfMemory as shortage:
            return no_room(shortage)
        finally:
            self.engine.rest()

    def _sample(self, requests: list[Request], prompts: PromptStore, sampling: Sampling) -> Experience | None:
        rows = [row for row, _ in requests]
        seeds = [seed for _, seed in requests]
        found: list[Rollout] = []
        waiting: list[Rollout] = []
        prompt_ids = [prompts.ids(row) for row in rows]
        reward = Located(self.reward, prompts)
        with (
            Overlapped(reward) as scored,
            contextlib.closing(self.engine.stream(prompt_ids, sampling, seeds=seeds)) as stream,
        ):
            for rollout in stream:
                waiting.append(rollout)
                if self.reward.concurrent and len(waiting) >= SCORED_AT_ONCE:
                    scored.submit(reward.noted(*as_request(prompts, rows, waiting, self.tokenizer)))
                    found, waiting = found + waiting, []
                if self.stopped():
                    return None
            if waiting:
                scored.submit(reward.noted(*as_request(prompts, rows, waiting, self.tokenizer)))
                found += waiting
            if not found:
                return None
            experience = Experience.of([rows[r.prompt] for r in found], found, scored.joined())
        return experience.take(sorted(range(len(found)), key=lambda i: (found[i].prompt, found[i].sample)))


def no_room(shortage: OutOfMemory) -> NoRoom:
    return NoRoom(f"the rollout does not fit into memory ({shortage}); {ROLLOUT_FLAGS}")


class Located:
    """A reward whose complaints say where the user finds the row that they are about."""

    def __init__(self, reward: Reward, store: PromptStore):
        self.reward, self.store = reward, store
        self.name, self.concurrent = reward.name, reward.concurrent
        self._noted: list[tuple[RewardRequest, list[int]]] = []

    def noted(self, request: RewardRequest, rows: list[int]) -> RewardRequest:
        self._noted.append((request, rows))
        return request

    def __call__(self, request: RewardRequest) -> RewardResult:
        try:
            return self.reward(request)
        except RewardFailed as error:
            if error.row is None:
                raise
            rows = next(rows for known, rows in self._noted if known is request)
            where = self.store.place(rows[error.row])
            raise type(error)(f"{error}; its prompt stands in {where}", error.row) from error

    def close(self) -> None:
        self.reward.close()


def as_request(
    store: PromptStore, rows: Sequence[int], rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase
) -> tuple[RewardRequest, list[int]]:
    """What a reward sees of finished samples: their text without the token that ended it. And their rows."""
    responses = tokenizer.batch_decode([r.ids for r in rollouts], skip_special_tokens=True)
    asked = [rows[r.prompt] for r in rollouts]
    ids = [r.prompt_ids for r in rollouts], [r.ids for r in rollouts]
    return request_of(store, asked, responses, *ids), asked
