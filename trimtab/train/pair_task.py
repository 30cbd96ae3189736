"""What jobs on preference pairs share: chosen and rejected lie side by side and share their prompt's tokens."""

import numpy as np
import torch

from trimtab.config.jobs import DPOOptions, RMOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.pairs import PairStore, build_pair_store
from trimtab.train.task import Task, Totals


class PairTask(Task):
    options: RMOptions | DPOOptions
    sequences_a_sample = 2

    def build_store(self, rows, what):
        return build_pair_store(rows, self.tokenizer, self.options, what=what)

    def make_batch(self, store: PairStore, samples: list[int]) -> TokenBatch:
        """Sequence 2i is the chosen answer of the i-th sample, 2i + 1 the rejected one."""
        examples = [example for i in samples for example in store.pair(i)]
        shared = [borrowed for i in samples for borrowed in (0, int(store.shared[i]))]
        extra = {}
        if store.margins is not None:
            extra["margin_P"] = torch.from_numpy(store.margins[samples])
        return TokenBatch.of(examples, shared, **extra)

    def lengths(self, store: PairStore) -> np.ndarray:
        return store.lengths_sharing

    def totals(self, batches: list[TokenBatch]) -> Totals:
        totals = super().totals(batches)
        return totals | {"pairs": totals["sequences"] / 2}
