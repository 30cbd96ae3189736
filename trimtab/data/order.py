"""Which samples form optimiser step k: a pure function of (seed, k), so a resumed run needs only the step number."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass
class SampleOrder:
    """Every epoch is a fresh permutation, cut into steps of `batch_size`; the last step of an epoch may be smaller."""

    samples: int
    batch_size: int
    epochs: int
    seed: int
    most: int | None = None
    """Stop after this many steps."""
    shuffled: bool = True
    """Else every epoch has the samples in the order of the data."""
    multiple: int = 1
    """An epoch leaves out the last samples of its permutation that do not fill so many."""

    @property
    def samples_per_epoch(self) -> int:
        return self.samples - self.samples % self.multiple

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.batch_size)

    @property
    def steps(self) -> int:
        every = self.steps_per_epoch * self.epochs
        return every if self.most is None else min(every, self.most)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.steps_per_epoch == 0

    def step_samples(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.steps_per_epoch)
        order = self._permutation(epoch)[: self.samples_per_epoch]
        return order[index * self.batch_size : (index + 1) * self.batch_size].tolist()

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffled:
            return np.arange(self.samples)
        if self._cache.get("epoch") != epoch:
            self._cache.update(epoch=epoch, order=np.random.default_rng([self.seed, epoch]).permutation(self.samples))
        return self._cache["order"]

    @cached_property
    def _cache(self) -> dict:
        return {}

    def fingerprint(self, content: str) -> str:
        """Identifies data and order together: the content's own hash and everything the order depends on."""
        key = f"{content}/{self.samples}/{self.batch_size}/{self.seed}"
        if not self.shuffled or self.multiple > 1:
            key += f"/{self.shuffled}/{self.multiple}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
