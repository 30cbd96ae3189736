"""The graphs captured for a policy, kept between calls while it still does what the policy does."""

import logging

import torch

from trimtab.distributed.device import has_graphs
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.cache import KVCache
from trimtab.rollout.builtin.graphs import CannotCapture, DecodeGraphs
from trimtab.rollout.builtin.read_graphs import ReadGraphs
from trimtab.rollout.builtin.sampler import Sampler
from trimtab.rollout.builtin.weights import switches
from trimtab.rollout.types import Sampling

logger = logging.getLogger(__name__)


class CapturedGraphs:
    def __init__(self, policy: Policy, slots: int, *, possible: bool = True):
        self.policy, self.slots = policy, slots
        self.possible = possible and has_graphs(policy.device)
        self.release()

    def release(self) -> None:
        self.reads: ReadGraphs | None = None
        self.decodes: DecodeGraphs | None = None
        self._hold_for: tuple = ()
        self._rule: tuple = ()  # that they draw by

    def follow(self, cache: KVCache, *, fused: bool) -> None:
        """Drop what holds no longer; `fused`: the policy's layers are."""
        if not self.possible:
            return
        hold_for = fingerprint(self.policy, cache)
        if hold_for != self._hold_for:
            self.release()
            self._hold_for = hold_for
        by_varlen = cache.keys.dtype in (torch.bfloat16, torch.float16) and cache.keys.shape[-1] % 8 == 0
        if self.reads is None and fused and by_varlen:
            self.reads = ReadGraphs()

    def give_up(self, reason: CannotCapture) -> None:
        """Do not try again."""
        logger.warning("the model cannot be captured as a graph and generates more slowly: %s", reason)
        self.release()
        self.possible = False

    def decoding(self, cache: KVCache, sampling: Sampling, longest: int) -> DecodeGraphs | None:
        """For such samples of at most `longest` tokens; None where the host has a part in every step."""
        if not self.possible or sampling.repetition_penalty != 1.0 or sampling.top_log_probs:
            return None
        if self.decodes is None or self._rule != sampling.rule or not self.decodes.holds(longest):
            self.decodes = None  # its memory first
            sampler = Sampler(sampling, self.policy.head.out_features, cache.keys.device)
            self.decodes, self._rule = DecodeGraphs(sampler, cache, self.slots, longest), sampling.rule
        return self.decodes


def fingerprint(policy: Policy, cache: KVCache) -> tuple:
    """Changes when a graph no longer does what the policy does: tensors lie elsewhere, adapters are switched. Memory of
    another size may lie where the last one lay."""
    addresses = tuple(t.data_ptr() for t in (*policy.parameters(), *policy.buffers(), cache.keys, cache.values))
    return addresses, cache.pages, switches(policy)
