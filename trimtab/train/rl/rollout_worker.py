"""What travels between the loop, which decides what is written, and the processes that write it."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from trimtab.data.tokenizer import texts_of
from trimtab.distributed.launcher import Role
from trimtab.distributed.process_group import Peers
from trimtab.distributed.weight_transfer import TransferPlan
from trimtab.errors import OutOfMemory
from trimtab.rewards.build import Parts
from trimtab.rewards.requests import PromptBatch, RewardQueue, make_reward_request
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, rewards_info
from trimtab.rollout.engine import Engine, ReceivingEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.micro_batch_limit import NoRoom, memory_guard
from trimtab.train.rl.experience import Experience


@dataclass
class Failed:
    """Prompts whose groups are left out: an environment failed in them, retries and all. No score is made up."""

    prompts: list[int] = field(default_factory=list)  # which of those that were asked for
    words: list[str] = field(default_factory=list)  # the environment's, one of each group's
    episodes: int = 0  # that failed

    @classmethod
    def of(cls, rollouts: Iterable[Trajectory]) -> "Failed":
        found: dict[int, str] = {}
        episodes = 0
        for rollout in rollouts:
            assert rollout.episode is not None, "an environment was played"
            if rollout.episode.problem is not None:  # else it was given up for another one of its group
                found.setdefault(rollout.prompt, rollout.episode.problem)
                episodes += 1
        return cls(list(found), list(found.values()), episodes)


@dataclass
class Answers:
    """All answers to some prompts, in order, and what each reward says of them."""

    experience: Experience
    results: list[RewardResult]


@dataclass
class Replied:
    """What became of prompts that were asked for at once."""

    answers: Answers | None  # None: all groups have failed
    failed: Failed = field(default_factory=Failed)


# ---- rewards near the engine


class SampleScorer:
    """What each of several rewards says of finished samples. A complaint names the row of the data that it is about."""

    def __init__(self, rewards: Parts, questions: PromptBatch, tokenizer: Any):
        self.rewards, self.questions, self.tokenizer = rewards, questions, tokenizer
        self.concurrent = all(reward.concurrent for reward, _ in rewards)

    def __call__(self, rollouts: Sequence[Trajectory]) -> list[RewardResult]:
        return self.judge(self.request(rollouts), rollouts) if self.rewards else []

    def judge(self, request: RewardRequest, rollouts: Sequence[Trajectory]) -> list[RewardResult]:
        """`request`: that of these samples."""
        try:
            return [reward(request) for reward, _ in self.rewards]
        except RewardFailed as error:
            if error.row is not None:
                error.row = self.questions.rows[rollouts[error.row].prompt]
            raise

    def request(self, rollouts: Sequence[Trajectory]) -> RewardRequest:
        """Their text without the token that ended it."""
        responses = texts_of(self.tokenizer, [r.tokens for r in rollouts])
        ids = [r.prompt_ids for r in rollouts], TokenLists(rollouts)
        episodes = [r.episode for r in rollouts if r.episode is not None]
        openings = self.tokenizer.batch_decode(ids[0]) if episodes else []
        return make_reward_request(self.questions, [r.prompt for r in rollouts], responses, *ids, episodes, openings)


class TokenLists(Sequence[list[int]]):
    """The tokens of answers, as lists that are made where somebody asks for them: most rewards do not."""

    def __init__(self, rollouts: Sequence[Trajectory]):
        self.rollouts = rollouts

    def __len__(self) -> int:
        return len(self.rollouts)

    @overload
    def __getitem__(self, place: int) -> list[int]: ...
    @overload
    def __getitem__(self, place: slice) -> "TokenLists": ...
    def __getitem__(self, place: int | slice) -> "list[int] | TokenLists":
        found = self.rollouts[place]
        return found.ids if isinstance(found, Trajectory) else TokenLists(found)

    def __reduce__(self) -> tuple:
        return list, (list(self),)


# ---- the worker


ROLLOUT_FLAGS = "lower --rollout_slots, --rollout_kv_tokens, --generate_max_len or --micro_rollout_batch_size"
SCORED_AT_ONCE = 64  # finished samples that go to a reward together while others are being written


class RolloutWorker(Role):
    def __init__(
        self,
        engine: Engine,
        rewards: Parts,
        tokenizer: Any,
        stopped: Callable[[], bool],
        tensor: Peers | None = None,
        *,
        player: Engine | None = None,
    ):
        """`stopped`: whether to give up what is being written; `tensor`: who writes the same answers; `player`: has
        the engine play an environment."""
        self.engine, self.rewards = engine, rewards
        self.player, self.plays = player or engine, player is not None
        self.tokenizer, self.stopped = tokenizer, stopped
        self.tensor = tensor or Peers()

    def describe(self) -> dict[str, Any]:
        # Which turns meet in a pass depends on who answers when. So the last bits of what was drawn are not those of a
        # resumed run; the trainer's own are.
        exact = self.engine.exact
        return {"engine_exact": exact, "exact": exact and not self.plays, **rewards_info(self.rewards)}

    def weights_changed(self, *, version: int) -> None:
        self.engine.weights_changed(version)

    def close(self) -> None:
        for reward, _ in self.rewards:
            reward.close()
        if self.plays:
            self.player.close()
        self.engine.close()

    # ---- an engine that is sent its weights

    def seats(self) -> list[dict[str, Any]]:
        assert isinstance(self.engine, ReceivingEngine)
        return self.engine.receivers()

    def join_links(self, *, plan: TransferPlan) -> None:
        assert isinstance(self.engine, ReceivingEngine)
        self.engine.connect(plan)

    def receive_weights(self, *, version: int) -> None:
        """At the same time as the policy sends them."""
        assert isinstance(self.engine, ReceivingEngine)
        self.engine.receive_weights(version)

    def probe(self, *, prompts: list[list[int]], seeds: list[int], sampling: SamplingParams) -> Experience:
        """Answers to compare with the trainer's log-probs."""
        return Experience.of(range(len(prompts)), self.engine.generate(prompts, sampling, seeds=seeds))

    # ---- answers

    def sample(self, questions: PromptBatch, *, sampling: SamplingParams) -> Replied | RewardFailed | NoRoom | None:
        """None: there were no prompts, or it was given up. A failed reward, or a lack of memory, is handed back, not
        raised: all processes can then still write a checkpoint."""
        try:
            with memory_guard():
                return self._sample(questions, sampling)
        except RewardFailed as failure:
            return failure
        except RunStopped:
            return None
        except OutOfMemory as shortage:
            return rollout_too_large(shortage)
        finally:
            self.engine.trim_memory()

    def _sample(self, questions: PromptBatch, sampling: SamplingParams) -> Replied | None:
        found: list[Trajectory] = []
        waiting: list[Trajectory] = []
        failed: list[Trajectory] = []
        rewards = SampleScorer(self.rewards, questions, self.tokenizer)
        stream = self._stream(questions, sampling)
        with RewardQueue(rewards) as scored, contextlib.closing(stream):
            for rollout in stream:
                (failed if rollout.finish == "failed" else waiting).append(rollout)
                if self.tensor.any(self.stopped() or scored.failed):
                    scored.check()
                    return None
                if rewards.concurrent and len(waiting) >= SCORED_AT_ONCE:
                    scored.add(waiting)
                    found, waiting = found + waiting, []
            if not self.tensor.leads:  # nobody hears what it would say
                return None
            if waiting:
                scored.submit(waiting)
                found += waiting
            if not found and not failed:
                return None
            results = [RewardResult.joined(part) for part in zip(*scored.results())]
        lost = Failed.of(failed)
        order = [i for i in range(len(found)) if found[i].prompt not in lost.prompts]
        if not order:
            return Replied(None, lost)
        order.sort(key=lambda i: (found[i].prompt, found[i].sample, found[i].branch))
        found = [found[i] for i in order]
        experience = Experience.of([questions.rows[r.prompt] for r in found], found)
        return Replied(Answers(experience, [result.take(order) for result in results]), lost)

    def _stream(self, questions: PromptBatch, sampling: SamplingParams) -> Generator[Trajectory]:
        tasks = questions.tasks() if self.plays else None
        return self.player.stream(questions.ids, sampling, seeds=questions.seeds, tasks=tasks)


def rollout_too_large(shortage: OutOfMemory) -> NoRoom:
    return NoRoom(f"the rollout does not fit into memory ({shortage}); {ROLLOUT_FLAGS}")
