"""Where the experience of the next iteration comes from: sampled now, read from a recording, or written ahead while the
trainer learns (asynchronous/).

Every kind of supply hands out the same: what was sampled (None: no group was useful any more), how many prompts that
took, and figures of it; or None if it was given up because the run is to stop.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from trimtab.algos.group_rewards import equal_groups, for_groups, within
from trimtab.config.jobs import RLOptions
from trimtab.data.order import SampleOrder
from trimtab.errors import UserError
from trimtab.files import writing
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.rl.asking import Asked, Asking
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.failures import Failures
from trimtab.train.rl.recording import Recording, Sampled
from trimtab.train.rl.spans import Told


class Supply(ABC):
    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the log-probs of what was handed out last are those that the trainer would give."""

    @abstractmethod
    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None: ...

    # ---- what outlives an update, where anything does

    def paused(self) -> AbstractContextManager[None]:
        """Inside nobody writes: the weights may change, and others may ask."""
        return nullcontext()

    def trained(self) -> None:  # noqa: B027
        """What was handed out last has been learnt from."""

    def settled(self) -> dict[str, list[int]] | None:
        """Which places of the data the batch handed out last settles, and how."""
        return None

    def spans(self) -> dict[int, list[Told]]:
        """What each process that writes has done since it was asked last, for the time-line."""
        return {}

    def built_anew(self) -> None:  # noqa: B027 (most have nobody to tell)
        """Those who write know nothing any more."""

    def engine_replaced(self) -> None:  # noqa: B027
        """One who writes knows nothing any more."""

    def state(self, *, in_hand: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """What is written and not trained yet: its tensors, and the rest of it; `in_hand`: whether the loop has what
        was handed out last."""
        return {}, None

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on with that."""
        if state["ledger"]["versions"]:
            raise UserError(
                f"this run was asynchronous, and {len(state['ledger']['versions'])} groups of its checkpoint are not "
                "trained yet; give --async_train to go on with them"
            )


def order_of_prompts(prompts: int, options: RLOptions, episodes: int) -> SampleOrder:
    """The prompts one by one, over all episodes."""
    multiple = prompts_at_once(options) if options.drop_last else 1
    shuffled = not options.no_shuffle
    return SampleOrder(prompts, 1, episodes, options.seed, shuffled=shuffled, multiple=multiple)


def prompts_at_once(options: RLOptions) -> int:
    """That are answered in one round of sampling."""
    more = options.vllm_generate_batch_size if options.dynamic_filtering else None
    return more or options.rollout_batch_size


class SampledNow(Supply):
    """Answers to the next prompts; with dynamic filtering, to more and more until enough groups are useful."""

    def __init__(self, options: RLOptions, order: SampleOrder, sampling: SamplingParams, asking: Asking):
        """`order`: the prompts one by one, over all episodes."""
        self.options, self.order, self.sampling, self.asking = options, order, sampling, asking

    @property
    def exact(self) -> bool:
        return self.asking.exact

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        options, left = self.options, self.order.steps - prompts_used
        wanted = min(options.rollout_batch_size, left)
        most = options.dynamic_filtering_batches or left
        taken, rounds, kept, groups = 0, 0, [], 0
        failures = Failures(options)
        while groups < wanted and taken < left and rounds < most:
            # Without filtering, more are needed only where groups have failed.
            at_once = prompts_at_once(options) if options.dynamic_filtering else wanted - groups
            count = min(at_once, left - taken)
            asked = self._answers(prompts_used + taken, count)
            if asked is None or stop.signal:
                return None
            taken, rounds = taken + count, rounds + 1
            failures.add(asked.failed, asked.failed_episodes)
            part = asked.experience
            if part is None:
                continue
            useful = useful_groups(part, options)
            if not useful:
                continue
            kept.append(part if len(useful) == part.groups else part.take(part.samples_of(useful)))
            groups += len(useful)
        filtered = taken - groups - failures.groups
        figures = {"filtered_groups": float(filtered)} if options.dynamic_filtering else {}
        figures |= failures.figures()
        if groups < wanted and taken < left:
            self._check_limit(groups, rounds)
        elif not kept or (options.drop_last and groups < options.rollout_batch_size):
            return None, taken, figures
        experience = Experience.joined(kept)
        if experience.groups > wanted:
            experience = experience.take(experience.samples_of(range(wanted)))
        return experience, taken, figures

    def _answers(self, first: int, count: int) -> Asked | None:
        places = range(first, first + count)
        requests = [(self.order.step_samples(p)[0], request_seed(self.options.seed, p)) for p in places]
        return self.asking.ask(requests, "train", self.sampling)

    def _check_limit(self, groups: int, rounds: int) -> None:
        """--dynamic_filtering_batches has ended the sampling: what there is, is learnt from, if there is anything."""
        if not groups:
            raise RewardFailed(
                f"no group of answers was of use in {rounds} rounds of sampling (--dynamic_filtering_batches): by "
                "--dynamic_filtering all of them teach nothing; look at the reward"
            )


def useful_groups(experience: Experience, options: RLOptions) -> list[int]:
    """Those that --dynamic_filtering keeps."""
    if not options.dynamic_filtering:
        return list(range(experience.groups))
    groups_E, scores_E, drawn_E = experience.groups_E, experience.scores_S[experience.firsts_E], experience.drawn_E
    if options.dynamic_filtering_rule == "differing":
        useful_G = ~for_groups(equal_groups, groups_E, scores_E, counted_S=drawn_E, empty=True)
    else:
        low, high = options.dynamic_filtering_reward_range
        useful_G = for_groups(partial(within, low=low, high=high), groups_E, scores_E, counted_S=drawn_E)
    return useful_G.nonzero()[:, 0].tolist()


class Replayed(Supply):
    """What a run recorded."""

    def __init__(self, recording: Recording, asking: Asking):
        self.recording, self.asking = recording, asking

    @property
    def exact(self) -> bool:
        return self.asking.exact and self.recording.sampled_alike

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        return self.recording.read(iteration)


class Recorded(Supply):
    """Another supply, whose experience is also written down."""

    def __init__(self, supply: Supply, recording: Recording):
        self.supply, self.recording = supply, recording

    @property
    def exact(self) -> bool:
        return self.supply.exact

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        sampled = self.supply.next(iteration, prompts_used, stop)
        if sampled is not None and not stop.signal:
            with writing(f"--record {self.recording.folder}: cannot write there"):
                self.recording.write(iteration, sampled)
        return sampled

    def paused(self) -> AbstractContextManager[None]:
        return self.supply.paused()

    def trained(self) -> None:
        self.supply.trained()

    def settled(self) -> dict[str, list[int]] | None:
        return self.supply.settled()

    def spans(self) -> dict[int, list[Told]]:
        return self.supply.spans()

    def built_anew(self) -> None:
        self.supply.built_anew()

    def engine_replaced(self) -> None:
        self.supply.engine_replaced()

    def state(self, *, in_hand: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        return self.supply.state(in_hand=in_hand)

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.supply.restore(tensors, state)
