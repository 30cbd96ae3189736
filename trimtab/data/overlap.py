"""Which prompts to evaluate on are trained on too: what is measured on them is not held out."""

from collections.abc import Iterator

import numpy as np


def count_shared(trained: Iterator[bytes], evaluated: Iterator[bytes]) -> int:
    """How many of the second occur among the first."""
    looked_for = list(evaluated)
    wanted = set(looked_for)
    found = wanted.intersection(trained)
    return sum(beginning in found for beginning in looked_for)


def beginnings(
    ids: np.ndarray, offsets: np.ndarray, marked: np.ndarray | None = None, every: int = 1
) -> Iterator[bytes]:
    """The tokens of every sequence up to the first marked one: its prompt. A text that is marked all over counts as a
    whole. `every`: 2 for pairs, whose sides have one prompt."""
    for begin, end in zip(offsets[:-1:every].tolist(), offsets[1::every].tolist()):
        stop = end
        if marked is not None and (first := int(marked[begin:end].argmax())) > 1:
            stop = begin + first
        yield ids[begin:stop].tobytes()
