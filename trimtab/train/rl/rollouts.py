"""The role that answers prompts: an engine, and the rewards that are best near it (functions, servers, verifiers). With
an environment the answers are episodes, which the engine is made to play.

Samples go to those rewards as they finish, while others are still being written. Every process answers its own share.
Those of a tensor group share one: they write the same answers, go on or stop together, and the first has the rewards.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from trimtab.distributed.launcher import Role
from trimtab.distributed.process_group import Peers
from trimtab.distributed.weight_transfer import TransferPlan
from trimtab.errors import OutOfMemory
from trimtab.rewards.build import Parts
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.reward_queue import RewardQueue
from trimtab.rewards.types import RewardFailed, RewardResult, rewards_info
from trimtab.rollout.engine import Engine, ReceivingEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.pass_limit import NoRoom, memory_guard
from trimtab.train.rl.answers import Admission, Answers, Collected, Failed, Replied, UnderWay, Wait
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.judging import Judging, Several
from trimtab.train.rl.spans import Spans, Told
from trimtab.train.rl.writing import Writing
from trimtab.train.rl.writing_beside import WritingBeside

ROLLOUT_FLAGS = "lower --rollout_slots, --rollout_kv_tokens, --generate_max_len or --micro_rollout_batch_size"
SCORED_AT_ONCE = 64  # finished samples that go to a reward together while others are being written


class Rollouts(Role):
    def __init__(
        self,
        engine: Engine,
        rewards: Parts,
        tokenizer: Any,
        stopped: Callable[[], bool],
        tensor: Peers | None = None,
        *,
        player: Engine | None = None,
        beside: bool = False,
    ):
        """`stopped`: whether to give up what is being written; `tensor`: who writes the same answers; `player`: has
        the engine play an environment; `beside`: the engine can write while the policy learns."""
        self.engine, self.rewards = engine, rewards
        self.player, self.plays = player or engine, player is not None
        self.tokenizer, self.stopped = tokenizer, stopped
        self.tensor = tensor or Peers()
        self._spans = Spans()
        self._judging = Judging(rewards, tokenizer, self._spans)
        writing = Writing(self.player, self._judging, stopped, self.tensor, plays=self.plays)
        self.writing: Writing | WritingBeside = WritingBeside(writing) if beside else writing

    def describe(self) -> dict[str, Any]:
        # Which turns meet in a pass depends on who answers when. So the last bits of what was drawn are not those of a
        # resumed run; the trainer's own are.
        exact = self.engine.exact
        return {"engine_exact": exact, "exact": exact and not self.plays, **rewards_info(self.rewards)}

    def weights_changed(self, *, version: int) -> None:
        self.engine.weights_changed(version)

    def close(self) -> None:
        self.writing.close()
        self._judging.close()
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

    # ---- answers that outlive an update

    def admit(self, admission: Admission, *, sampling: SamplingParams) -> None:
        """Write these groups too, from the next `collect` on or, an engine of its own, unless it pauses."""
        self.writing.admit(admission, sampling)

    def collect(
        self, *, seconds: float | None = None, at_once: bool = True
    ) -> Collected | RewardFailed | NoRoom | None:
        """What was written and judged since the last time, after so many seconds or, `at_once`, as soon as there is a
        group; who writes by itself is not held up by either.
        None: told to stop. Failures are handed back as by `sample`; the groups are then still among the unfinished."""
        try:
            with memory_guard():
                return self.writing.collect(seconds, at_once=at_once)
        except RewardFailed as failure:
            return failure
        except OutOfMemory as shortage:
            self.writing.abandon()
            return no_room(shortage)

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """Whether the engine is free for others by now, until it is told to go on or, where the policy is in this
        process, to `collect`. `drained`: an engine that writes by itself first ends what it has begun, if that takes no
        more than so many seconds."""
        return self.writing.pause(drained=drained, seconds=seconds)

    def go_on(self) -> None:
        """At first, and after a pause."""
        self.writing.go_on()

    def unfinished(self) -> list[UnderWay]:
        return self.writing.unfinished()

    def waits(self) -> list[Wait]:
        return self.writing.waits()

    def spans(self) -> list[Told]:
        """What was written and judged when, since the last time."""
        return self._spans.taken()

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
            return no_room(shortage)
        finally:
            self.engine.trim_memory()

    def _sample(self, questions: PromptBatch, sampling: SamplingParams) -> Replied | None:
        found: list[Trajectory] = []
        waiting: list[Trajectory] = []
        failed: list[Trajectory] = []
        rewards = Several(self.rewards, questions, self.tokenizer)
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


def no_room(shortage: OutOfMemory) -> NoRoom:
    return NoRoom(f"the rollout does not fit into memory ({shortage}); {ROLLOUT_FLAGS}")
