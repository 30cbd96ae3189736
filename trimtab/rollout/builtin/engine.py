"""The built-in rollout engine: generates with the trainer's own weights, in place.

What it keeps between calls is memory and captured graphs; what a call does is in call.py. On an accelerator the steps
between two looks are captured (graphs.py), and so is the reading of prompts (read_graphs.py), with kernels of their own
(kernels/). Where that cannot be, and on a CPU, the same passes run as they come.
"""

import contextlib
from collections.abc import Collection, Generator, Sequence

import torch

from trimtab.distributed.device import free_memory
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.call import Call
from trimtab.rollout.builtin.captured import CapturedGraphs
from trimtab.rollout.builtin.fused_layers import recognised
from trimtab.rollout.builtin.int8 import Int8Layers
from trimtab.rollout.builtin.memory import PAGE_SIZE, KVMemory
from trimtab.rollout.builtin.runner import Runner
from trimtab.rollout.types import Rollout, Sampling

READ_TOKENS = 8192  # prompt tokens in one pass


class BuiltinEngine:
    def __init__(
        self,
        policy: Policy,
        tokenizer=None,
        *,
        slots: int = 256,
        kv_tokens: int | None = None,
        page_size: int = PAGE_SIZE,
        read_tokens: int = READ_TOKENS,
        weight_only_int8: bool = False,
    ):
        """`slots`: samples that run at once; `kv_tokens`: memory for keys and values (planned from what is free if
        not given); `read_tokens`: prompt tokens in one pass; `weight_only_int8`: see int8.py."""
        if policy.path != "packed":
            raise UserError(f"{type(policy.inner).__name__} does not use the attention interface; the engine needs it")
        self.policy, self.tokenizer, self.slots = policy, tokenizer, slots
        self.read_tokens = read_tokens
        with policy.at_work():
            shape, arguments = Runner.measure(policy)
            self._fused = recognised(policy, shape, arguments)
        self._memory = KVMemory(shape, page_size, kv_tokens)
        self.exact = shape.dtype == torch.float32 and not weight_only_int8
        self._int8 = Int8Layers(policy) if weight_only_int8 else None
        self.captured = CapturedGraphs(policy, slots)
        self._call: Call | None = None

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, **options) -> list[Rollout]:
        """All answers, in the order of the prompts and their samples."""
        rollouts = list(self.stream(prompts, sampling, **options))
        return sorted(rollouts, key=lambda r: (r.prompt, r.sample))

    @torch.no_grad()
    def stream(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        logit_hook=None,
    ) -> Generator[Rollout]:
        """Answers as they finish. Until the last one, or until the stream is closed, the policy is the engine's.

        `seeds`: one for each prompt (its samples draw from streams of their own); `limits`: each prompt's own
        max_new_tokens. Of a policy that is split over processes, every process must ask, if for no prompts at all.
        """
        if self._call is not None:
            raise UserError("the engine is at work already; take all its answers first, or close their stream")
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        self._check(prompts, sampling, seeds, limits)
        try:
            with self.policy.at_work(), self._int8 or contextlib.nullcontext():
                call = self._call = Call(self, prompts, sampling, seeds, limits, logit_hook)
                cache = self._memory.cache(min(self.slots, len(call.samples)), call.longest, call.device)
                self.captured.follow(cache, fused=self._fused is not None)
                call.reads = self.captured.reads
                if logit_hook is None:
                    call.graphs = self.captured.decoding(cache, sampling, call.longest)
                with Runner(self.policy, cache, self._fused) as runner:
                    yield from call.run(runner)
        finally:
            self._call = None

    def abort(self, prompts: Collection[int] | None = None) -> None:
        """Stop the answers to these prompts, or all: the stream gives what they have so far, finished by "abort"."""
        if self._call is not None:
            self._call.abort(prompts)

    def sleep(self) -> None:
        """Give the engine's memory back; the next call takes what it needs again."""
        if self._call is not None:
            raise UserError("the engine is at work and cannot sleep; take all its answers first, or close their stream")
        self.captured.release()
        self._memory.release()
        if self._int8 is not None:
            self._int8.release()

    def rest(self) -> None:
        """Between the calls of a training loop: sleep if what is held is more than what is still free."""
        if self._memory.held > free_memory(self.policy.device):
            self.sleep()

    def wake(self) -> None:
        """Nothing to prepare: the next call takes the memory it needs."""

    def _check(self, prompts: Sequence[list[int]], sampling: Sampling, seeds, limits: Sequence[int]) -> None:
        for name, values in (("seeds", seeds), ("limits", limits)):
            if values is not None and len(values) != len(prompts):
                raise UserError(f"{len(values)} {name} for {len(prompts)} prompts; one for each is needed")
        vocabulary = self.policy.head.out_features
        most = getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)
        for index, ids in enumerate(prompts):
            if not ids:
                raise UserError(f"prompt {index} is empty; at least one token is needed")
            if max(ids) >= vocabulary or min(ids) < 0:
                raise UserError(f"prompt {index} has a token outside the model's vocabulary of {vocabulary}")
            if limits[index] < 1:
                raise UserError(f"the limit of prompt {index} is {limits[index]}; at least 1 new token is needed")
            if most is not None and len(ids) + limits[index] > most:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens and {limits[index]} may follow, but the model's "
                    f"context is {most}; shorten the prompt or lower max_new_tokens"
                )
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one")
