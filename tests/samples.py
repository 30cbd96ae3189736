"""Random samples and their micro-batches."""

import numpy as np

from tests.tiny import VOCABULARY
from trimtab.data.batches import TokenBatch


def random_examples(lengths: list[int], *, prompt_share: float = 0.4, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    examples = []
    for length in lengths:
        trained = np.arange(length) >= int(length * prompt_share)
        examples.append((rng.integers(3, VOCABULARY, length), trained))
    return examples


def batch_of(lengths: list[int], **options) -> TokenBatch:
    return TokenBatch.of(random_examples(lengths, **options))


def spans_of(lengths: list[int]) -> list:
    return batch_of(lengths).spans
