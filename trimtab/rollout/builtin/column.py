"""Numbers that a sample draws one after another, in one array: a list of a million of them costs a second to make."""

from collections.abc import Sequence

import numpy as np

LEAST = 64  # places


class Column:
    """It grows at its end. Another thread may read what it has: what is read is never overwritten."""

    __slots__ = ("_places", "count")

    def __init__(self, dtype: type[np.generic], values: Sequence[float] | np.ndarray = ()):
        self._places = np.array(values, dtype=dtype)
        self.count = len(self._places)  # of the numbers; there may be more places

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int | float:
        return self.array[place].item()

    @property
    def last(self) -> np.generic:
        return self._places[self.count - 1]

    @property
    def array(self) -> np.ndarray:
        """All of them, as they lie."""
        return self._places[: self.count]

    def append(self, value: float) -> None:
        self.extend(np.array([value]))

    def extend(self, values: np.ndarray) -> None:
        end = self.count + len(values)
        if end > len(self._places):
            larger = np.empty(max(LEAST, 2 * end), dtype=self._places.dtype)
            larger[: self.count] = self._places[: self.count]
            self._places = larger
        self._places[self.count : end] = values
        self.count = end

    def cut(self, count: int) -> None:
        """To the first so many, for good."""
        self._places = self._places[:count].copy()
        self.count = count
