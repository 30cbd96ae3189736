"""Which sampler draws for the samples at work: one for all of them, or each row by its own setting."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.rollout.builtin.row_sampler import RowSampler
from trimtab.rollout.builtin.sampler import Sampler
from trimtab.rollout.builtin.scheduler import Sample


class Samplers:
    def __init__(self, vocabulary: int, device: torch.device):
        self.vocabulary, self.device = vocabulary, device
        self._last: Sampler | None = None

    def of(self, samples: Sequence[Sample]) -> Sampler | RowSampler:
        if not alike(samples):
            return RowSampler([sample.sampling for sample in samples], self.device)
        setting = samples[0].sampling
        if self._last is None or self._last.sampling.rule != setting.rule:
            self._last = Sampler(setting, self.vocabulary, self.device)
        return self._last

    def seen(self, samples: Sequence[Sample]) -> Tensor | None:
        """With a repetition penalty: which tokens stand in each sample or its prompt, [samples, vocabulary]."""
        if all(sample.sampling.repetition_penalty == 1.0 for sample in samples):
            return None
        texts = [sample.text for sample in samples]
        rows = np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])
        places = torch.from_numpy(np.stack([rows, np.concatenate(texts)])).to(self.device)
        seen = torch.zeros(len(samples), self.vocabulary, dtype=torch.bool, device=self.device)
        seen[places[0], places[1]] = True
        return seen


def alike(samples: Sequence[Sample]) -> bool:
    """Whether one rule draws for all of them."""
    first = samples[0].sampling
    return all(sample.sampling is first or sample.sampling.rule == first.rule for sample in samples)
