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

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

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
        return self._permutation(epoch)[index * self.batch_size : (index + 1) * self.batch_size].tolist()

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._cache.get("epoch") != epoch:
            self._cache.update(epoch=epoch, order=np.random.default_rng([self.seed, epoch]).permutation(self.samples))
        return self._cache["order"]

    @cached_property
    def _cache(self) -> dict:
        return {}

    def fingerprint(self, content: str) -> str:
        """Identifies data and order together: the content's own hash and everything the order depends on."""
        key = f"{content}/{self.samples}/{self.batch_size}/{self.seed}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
