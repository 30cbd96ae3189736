"""Numbers that a sample draws a few at a time, as arrays: a list of two million of them takes 0.1 s to make."""

from collections.abc import Sequence

import numpy as np


class Column:
    """It grows at its end, by arrays that nobody writes into any more. So another thread may read what it has."""

    __slots__ = ("_parts", "count")

    def __init__(self, dtype: type[np.generic], values: Sequence[float] | np.ndarray = ()):
        self._parts = [np.array(values, dtype=dtype)]
        self.count = len(self._parts[0])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int | float:
        return self.array[place].item()

    @property
    def last(self) -> np.generic:
        return self._parts[-1][-1]

    @property
    def array(self) -> np.ndarray:
        """All of them."""
        return np.concatenate(self._parts)

    def extend(self, values: np.ndarray, count: int) -> None:
        """By so many, at least one, of the same kind."""
        self._parts.append(values)
        self.count += count

    def cut(self, count: int) -> None:
        """To the first so many, for good."""
        self._parts, self.count = [self.array[:count]], count
