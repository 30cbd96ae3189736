"""The rollout worker: a process that runs an engine and the rewards that need no model.

These rewards are functions, servers and verifiers; reward models are a separate role (trainer.py). Finished samples are
scored while others are still being generated. With an environment the samples are episodes, which an episode engine
around the first engine generates. Every process samples its own share of the prompts. The ranks of a tensor-parallel
group have the same share: they generate the same samples, continue or stop together, and their first rank scores.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.data.tokenizer import texts_of
from trimtab.distributed.launcher import Role
from trimtab.distributed.process_group import Peers
from trimtab.distributed.weight_transfer import TransferPlan
from trimtab.errors import OutOfMemory
from trimtab.rewards.build import Parts
from trimtab.rewards.requests import PromptBatch, RewardQueue, make_reward_request
from trimtab.rewards.types import Reward, RewardFailed, RewardRequest, RewardResult, rewards_info
from trimtab.rollout.engine import Engine, ReceivingEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.rl.experience import Experience
from trimtab.train.update import InsufficientMemory, memory_guard


@dataclass
class FailedGroup:
    """A group that is left out because its environment or one of its rewards failed after all retries."""

    prompt: int  # index of its prompt in the request; for a group in flight, its place
    problem: str  # of the first failed episode or sample
    episodes: int = 1  # number of failed ones; 0: a reward failed


def failed_groups(failed: Iterable[Trajectory]) -> list[FailedGroup]:
    found: dict[int, FailedGroup] = {}
    for trajectory in failed:
        assert trajectory.episode is not None, "an environment was played"
        if trajectory.episode.problem is not None:  # None: it was aborted because another episode of its group failed
            group = found.setdefault(trajectory.prompt, FailedGroup(trajectory.prompt, trajectory.episode.problem, 0))
            group.episodes += 1
    return list(found.values())


def unrewarded_groups(rollouts: Sequence[Trajectory], results: Sequence[RewardResult]) -> list[FailedGroup]:
    """Groups with a sample that has no reward because a reward failed."""
    found: dict[int, FailedGroup] = {}
    for row, problem in sorted((row, why) for result in results for row, why in result.failed.items()):
        found.setdefault(rollouts[row].prompt, FailedGroup(rollouts[row].prompt, problem, 0))
    return list(found.values())


@dataclass
class SampledGroups:
    """Finished samples of several prompts, in order, and the results of each reward."""

    experience: Experience | None  # None: all groups have failed
    results: list[RewardResult]
    failed: list[FailedGroup] = field(default_factory=list)


# ---- groups in flight, which may span weight updates (async_worker.py)


@dataclass
class InFlightGroup:
    """An unfinished group, which may span weight updates."""

    place: int  # in the order of the prompts
    version: int  # of the weights when it was admitted: the iterations done by then
    row: int  # of the prompt data
    seed: int
    trajectories: list[Trajectory] = field(default_factory=list)  # of its samples; empty: not started


@dataclass
class Admission:
    """Groups for a worker to generate, with their prompts."""

    groups: list[InFlightGroup]
    prompt_batch: PromptBatch


@dataclass
class FinishedGroup:
    """A group whose samples have all finished, with the results of the rewards near the engine."""

    place: int
    experience: Experience
    results: list[RewardResult]


@dataclass
class Collected:
    """Results of one worker since the last `collect`."""

    finished: list[FinishedGroup]
    drawn: int  # sampled tokens
    read_again: int  # tokens of partial rollouts that were prefilled again with new weights
    seconds: float  # busy time of the engine
    failed: list[FailedGroup] = field(default_factory=list)


@dataclass
class Wait:
    """What one sample of a group is waiting for."""

    place: int
    sample: int
    what: str
    tokens: int  # generated so far
    seconds: float  # waited so far


# ---- the worker


@dataclass
class RewardClock:
    """What the rewards near an engine have taken since the run began."""

    seconds: float = 0.0
    share: float = 0.0  # of --reward_timeout, of the slowest call

    def add(self, reward: Reward, samples: int, seconds: float) -> None:
        self.seconds += seconds
        limit: float = getattr(reward, "seconds", 0) or getattr(reward, "timeout", math.inf)
        calls = 1 if getattr(reward, "batched", True) else max(samples, 1)
        self.share = max(self.share, getattr(reward, "slowest", seconds / calls) / limit)


class SampleScorer:
    """Scores finished samples of these prompts with the rewards near the engine. Failures name the row of the data."""

    def __init__(self, rewards: Parts, prompt_batch: PromptBatch, tokenizer: Any, clock: RewardClock):
        self.rewards, self.prompt_batch, self.tokenizer, self.clock = rewards, prompt_batch, tokenizer, clock
        self.concurrent = all(reward.concurrent for reward, _ in rewards)

    def __call__(self, rollouts: Sequence[Trajectory]) -> list[RewardResult]:
        return self.score(self.request(rollouts), rollouts) if self.rewards else []

    def score(self, request: RewardRequest, rollouts: Sequence[Trajectory]) -> list[RewardResult]:
        """Score; `request` must have been made from `rollouts`."""
        results: list[RewardResult] = []
        try:
            for reward, _ in self.rewards:
                began = time.monotonic()
                results.append(reward(request))
                self.clock.add(reward, len(request), time.monotonic() - began)
            return results
        except RewardFailed as error:
            if error.row is not None:
                error.row = self.prompt_batch.rows[rollouts[error.row].prompt]
            raise

    def request(self, rollouts: Sequence[Trajectory]) -> RewardRequest:
        """The reward request of these samples, with their text without the stop token."""
        responses = texts_of(self.tokenizer, [r.tokens for r in rollouts])
        ids = [r.prompt_ids for r in rollouts], [r.ids for r in rollouts]
        episodes = [r.episode for r in rollouts if r.episode is not None]
        openings = self.tokenizer.batch_decode(ids[0]) if episodes else []
        return make_reward_request(self.prompt_batch, [r.prompt for r in rollouts], responses, *ids, episodes, openings)


ROLLOUT_FLAGS = "lower --rollout_slots, --rollout_kv_tokens, --generate_max_len or --micro_rollout_batch_size"
SCORED_AT_ONCE = 64  # finished samples scored together while others are still being generated


class RolloutWorker(Role):
    """Generates samples with an engine and scores them with the rewards near it."""

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
        """`stopped`: whether a stop was requested; `tensor`: ranks that generate the same samples; `player`: the
        episode engine that uses `engine`."""
        self.engine, self.rewards = engine, rewards
        self.player, self.plays = player or engine, player is not None
        self.tokenizer, self.stopped = tokenizer, stopped
        self.tensor = tensor or Peers()
        self.clock = RewardClock()

    def reward_clock(self) -> list[float]:
        """Seconds of the rewards, and the slowest call's share of its time limit."""
        return [self.clock.seconds, self.clock.share]

    def describe(self) -> dict[str, Any]:
        # Timing decides which turns of episodes share a batch, so most engines' log-probs differ in their last bits
        # from those of a resumed run. The trainer's log-probs do not.
        exact, repeatable = self.engine.exact, self.engine.batch_invariant or not self.plays
        return {"engine_exact": exact, "exact": exact and repeatable, **rewards_info(self.rewards)}

    def weights_changed(self, *, version: int) -> None:
        self.engine.weights_changed(version)

    def close(self) -> None:
        for reward, _ in self.rewards:
            reward.close()
        if self.plays:
            self.player.close()
        self.engine.close()

    # ---- weight transfer to an engine in its own process

    def seats(self) -> list[dict[str, Any]]:
        assert isinstance(self.engine, ReceivingEngine)
        return self.engine.receivers()

    def join_links(self, *, plan: TransferPlan) -> None:
        assert isinstance(self.engine, ReceivingEngine)
        self.engine.connect(plan)

    def receive_weights(self, *, version: int) -> None:
        """Receive weights; the policy must send them at the same time."""
        assert isinstance(self.engine, ReceivingEngine)
        self.engine.receive_weights(version)

    def probe(self, *, prompts: list[list[int]], seeds: list[int], sampling: SamplingParams) -> Experience:
        """Samples for the comparison of the engine's log-probs with the trainer's."""
        with memory_guard():
            return Experience.of(range(len(prompts)), self.engine.generate(prompts, sampling, seeds=seeds))

    # ---- sampling

    def sample(
        self, prompt_batch: PromptBatch, *, sampling: SamplingParams
    ) -> SampledGroups | RewardFailed | InsufficientMemory | None:
        """Sample and score all prompts. None: no prompts, or a stop was requested. A failed reward and out-of-memory
        are returned, not raised, so that all processes can still write a checkpoint."""
        try:
            with memory_guard():
                return self._sample(prompt_batch, sampling)
        except RewardFailed as failure:
            return failure
        except RunStopped:
            return None
        except OutOfMemory as shortage:
            return rollout_too_large(shortage)
        finally:
            self.engine.trim_memory()

    def _sample(self, prompt_batch: PromptBatch, sampling: SamplingParams) -> SampledGroups | None:
        found: list[Trajectory] = []
        waiting: list[Trajectory] = []
        failed: list[Trajectory] = []
        rewards = SampleScorer(self.rewards, prompt_batch, self.tokenizer, self.clock)
        tasks = prompt_batch.tasks() if self.plays else None
        stream = self.player.stream(prompt_batch.ids, sampling, seeds=prompt_batch.seeds, tasks=tasks)
        with RewardQueue(rewards) as scored, contextlib.closing(stream):
            for rollout in stream:
                (failed if rollout.finish == "failed" else waiting).append(rollout)
                if self.tensor.any(self.stopped() or scored.failed):
                    scored.check()
                    return None
                if rewards.concurrent and len(waiting) >= SCORED_AT_ONCE:
                    scored.add(waiting)
                    found, waiting = found + waiting, []
            if not self.tensor.is_rank_zero:  # the client reads only the first rank's result
                return None
            if waiting:
                scored.submit(waiting)
                found += waiting
            if not found and not failed:
                return None
            results = [RewardResult.joined(part) for part in zip(*scored.results())]
        left_out = failed_groups(failed)
        played = {group.prompt for group in left_out}
        left_out += [group for group in unrewarded_groups(found, results) if group.prompt not in played]
        lost = {group.prompt for group in left_out}
        order = [i for i in range(len(found)) if found[i].prompt not in lost]
        if not order:
            return SampledGroups(None, [], left_out)
        order.sort(key=lambda i: (found[i].prompt, found[i].sample, found[i].branch))
        found = [found[i] for i in order]
        experience = Experience.of([prompt_batch.rows[r.prompt] for r in found], found)
        return SampledGroups(experience, [result.take(order) for result in results], left_out)


def rollout_too_large(shortage: OutOfMemory) -> InsufficientMemory:
    return InsufficientMemory(f"the rollout does not fit into memory ({shortage}); {ROLLOUT_FLAGS}")
