"""Where the experience of the next iteration comes from: sampled now, or read from a recording.

Every kind of supply hands out the same: what was sampled (None: no group was useful any more), how many prompts that
took, and figures of it; or None if it was given up because the run is to stop.
"""

from functools import partial
from typing import Protocol

from trimtab.algos.group_rewards import within
from trimtab.algos.groups import for_groups
from trimtab.config.jobs import RLOptions
from trimtab.data.order import SampleOrder
from trimtab.files import writing
from trimtab.interrupts import StopRequest
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.types import Sampling
from trimtab.train.rl.asking import Asking
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.recording import Recording, Sampled


class Supply(Protocol):
    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None: ...


class SampledNow:
    """Answers to the next prompts; with dynamic filtering, to more and more until enough groups are useful."""

    def __init__(self, options: RLOptions, order: SampleOrder, sampling: Sampling, asking: Asking):
        """`order`: the prompts one by one, over all episodes."""
        self.options, self.order, self.sampling, self.asking = options, order, sampling, asking

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        options, left = self.options, self.order.steps - prompts_used
        wanted = min(options.rollout_batch_size, left)
        at_once = (
            (options.vllm_generate_batch_size or options.rollout_batch_size) if options.dynamic_filtering else wanted
        )
        taken, kept, groups = 0, [], 0
        while groups < wanted and taken < left:
            count = min(at_once, left - taken)
            part = self._answers(prompts_used + taken, count)
            if part is None or stop.signal:
                return None
            taken += count
            if options.dynamic_filtering and (part := self._useful(part)) is None:
                continue
            kept.append(part)
            groups += part.groups
        figures = {"filtered_groups": float(taken - groups)} if options.dynamic_filtering else {}
        if not kept:
            return None, taken, figures
        experience = Experience.joined(kept)
        if experience.groups > wanted:
            experience = experience.take(experience.samples_of(range(wanted)))
        return experience, taken, figures

    def _answers(self, first: int, count: int) -> Experience | None:
        places = range(first, first + count)
        requests = [(self.order.step_samples(p)[0], request_seed(self.options.seed, p)) for p in places]
        return self.asking(requests, "train", self.sampling)

    def _useful(self, part: Experience) -> Experience | None:
        low, high = self.options.dynamic_filtering_reward_range
        useful = for_groups(partial(within, low=low, high=high), part.groups_S, part.scores_S)
        return part.take(part.samples_of(useful.nonzero()[:, 0].tolist())) if useful.any() else None


class Replayed:
    """What a run recorded."""

    def __init__(self, recording: Recording):
        self.recording = recording

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        return self.recording.read(iteration)


class Recorded:
    """Another supply, whose experience is also written down."""

    def __init__(self, supply: Supply, recording: Recording):
        self.supply, self.recording = supply, recording

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        sampled = self.supply.next(iteration, prompts_used, stop)
        if sampled is not None and not stop.signal:
            with writing(f"--record {self.recording.folder}: cannot write there"):
                self.recording.write(iteration, sampled)
        return sampled
