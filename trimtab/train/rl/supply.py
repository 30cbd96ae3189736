"""Where the experience of the next iteration comes from: sampled now, or read from a recording.

Every kind of supply hands out the same: what was sampled (None: no group was useful any more), how many prompts that
took, and figures of it; or None if it was given up because the run is to stop.
"""

from functools import partial
from typing import Protocol

from trimtab.algos.group_rewards import equal_groups, within
from trimtab.algos.groups import for_groups
from trimtab.config.jobs import RLOptions
from trimtab.data.order import SampleOrder
from trimtab.files import writing
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.types import Sampling
from trimtab.train.rl.asking import Asking
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.recording import Recording, Sampled


class Supply(Protocol):
    @property
    def exact(self) -> bool:
        """Whether the log-probs of what was handed out last are those that the trainer would give."""
        ...

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None: ...


def order_of_prompts(prompts: int, options: RLOptions, episodes: int) -> SampleOrder:
    """The prompts one by one, over all episodes."""
    multiple = prompts_at_once(options) if options.drop_last else 1
    shuffled = not options.no_shuffle
    return SampleOrder(prompts, 1, episodes, options.seed, shuffled=shuffled, multiple=multiple)


def prompts_at_once(options: RLOptions) -> int:
    """That are answered in one round of sampling."""
    more = options.vllm_generate_batch_size if options.dynamic_filtering else None
    return more or options.rollout_batch_size


class SampledNow:
    """Answers to the next prompts; with dynamic filtering, to more and more until enough groups are useful."""

    def __init__(self, options: RLOptions, order: SampleOrder, sampling: Sampling, asking: Asking):
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
        while groups < wanted and taken < left and rounds < most:
            count = min(prompts_at_once(options), left - taken)
            part = self._answers(prompts_used + taken, count)
            if part is None or stop.signal:
                return None
            taken, rounds = taken + count, rounds + 1
            if options.dynamic_filtering and (part := self._useful(part)) is None:
                continue
            kept.append(part)
            groups += part.groups
        figures = {"filtered_groups": float(taken - groups)} if options.dynamic_filtering else {}
        if groups < wanted and taken < left:
            self._check_limit(groups, rounds)
        elif not kept or (options.drop_last and groups < options.rollout_batch_size):
            return None, taken, figures
        experience = Experience.joined(kept)
        if experience.groups > wanted:
            experience = experience.take(experience.samples_of(range(wanted)))
        return experience, taken, figures

    def _answers(self, first: int, count: int) -> Experience | None:
        places = range(first, first + count)
        requests = [(self.order.step_samples(p)[0], request_seed(self.options.seed, p)) for p in places]
        return self.asking(requests, "train", self.sampling)

    def _check_limit(self, groups: int, rounds: int) -> None:
        """--dynamic_filtering_batches has ended the sampling: what there is, is learnt from, if there is anything."""
        if not groups:
            raise RewardFailed(
                f"no group of answers was of use in {rounds} rounds of sampling (--dynamic_filtering_batches): by "
                "--dynamic_filtering all of them teach nothing; look at the reward"
            )

    def _useful(self, part: Experience) -> Experience | None:
        if self.options.dynamic_filtering_rule == "differing":
            useful = ~for_groups(equal_groups, part.groups_S, part.scores_S)
        else:
            low, high = self.options.dynamic_filtering_reward_range
            useful = for_groups(partial(within, low=low, high=high), part.groups_S, part.scores_S)
        return part.take(part.samples_of(useful.nonzero()[:, 0].tolist())) if useful.any() else None


class Replayed:
    """What a run recorded."""

    def __init__(self, recording: Recording, asking: Asking):
        self.recording, self.asking = recording, asking

    @property
    def exact(self) -> bool:
        return self.asking.exact and self.recording.sampled_alike

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        return self.recording.read(iteration)


class Recorded:
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
