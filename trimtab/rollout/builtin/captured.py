"""The graphs captured for a policy, kept between calls while it still does what the policy does."""

import logging
from collections.abc import Sequence

import torch

from trimtab.distributed.device import has_graphs
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.cache import KVCache
from trimtab.rollout.builtin.graphs import CannotCapture, DecodeGraphs, rows_for
from trimtab.rollout.builtin.read_graphs import ReadGraphs
from trimtab.rollout.builtin.row_sampler import Kind, RowSampler
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
        self._by_rows: dict[bool, tuple[Kind, DecodeGraphs]] = {}  # with filters, and without
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
        width = cache.keys.shape[-1]
        by_varlen = cache.keys.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
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

    def decoding_by_rows(self, cache: KVCache, settings: Sequence[Sampling], longest: int) -> DecodeGraphs | None:
        """The same for samples of different settings, whose numbers may change from one run to the next."""
        kind = Kind.of(settings)
        if not self.possible or not all(can_be_recorded(setting) for setting in settings):
            return None
        found = self._by_rows.get(kind.filtered)
        if found is None or not found[0].covers(kind) or not found[1].holds(longest):
            kind = kind if found is None else found[0].together_with(kind)
            self._by_rows.pop(kind.filtered, None)  # its memory first
            sampler = RowSampler.blank(kind, rows_for(self.slots), cache.keys.device)
            found = self._by_rows[kind.filtered] = kind, DecodeGraphs(sampler, cache, self.slots, longest)
        return found[1]


def can_be_recorded(sampling: Sampling) -> bool:
    """What else a row may ask for is not made of a fixed number of numbers, or is not kept from step to step."""
    plain = sampling.repetition_penalty == 1 and sampling.top_log_probs == 0
    return plain and not sampling.logit_bias and not sampling.forbidden_tokens


def fingerprint(policy: Policy, cache: KVCache) -> tuple:
    """Changes when a graph no longer does what the policy does: tensors lie elsewhere, adapters are switched. Memory of
    another size may lie where the last one lay."""
    addresses = tuple(t.data_ptr() for t in (*policy.parameters(), *policy.buffers(), cache.keys, cache.values))
    return addresses, cache.pages, switches(policy)
