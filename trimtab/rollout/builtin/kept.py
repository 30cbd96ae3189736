"""Pages of what was read and drawn before, kept while nobody needs their room. Numbers only, as in pages.py.

A page is known by its tokens and by the page before it; the last one of a sequence may be filled in part. A new prompt
shares the whole pages that it begins with, and copies a last one that it would write into. What was used longest ago
makes room first, and always the end of a sequence before its beginning.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from trimtab.rollout.builtin.pages import PagePool

Key = tuple[int, tuple[int, ...]]  # (number of the page before, tokens)


@dataclass
class Found:
    """The beginning of a prompt, as far as it is kept."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)  # whole ones
    tail: int | None = None  # the page to copy that holds what the whole ones do not

    def without_tail(self, size: int) -> "Found":
        """Only its whole pages, of `size` tokens."""
        return Found(len(self.pages) * size, self.pages)


@dataclass(frozen=True)
class Kept:
    number: int
    page: int


class KeptPages:
    def __init__(self, pool: PagePool, least: int):
        """`least`: tokens that must be saved for it to be worth while, unless they are more than what is left."""
        self.pool, self.least = pool, least
        self.keeping = False
        self._kept: OrderedDict[Key, Kept] = OrderedDict()  # the one used longest ago first
        self._numbers = 0

    @property
    def alone(self) -> int:
        """Pages that nobody else holds: so many more would be free."""
        return sum(self.pool.holders(kept.page) == 1 for kept in self._kept.values())

    def find(self, ids: list[int]) -> Found:
        """What is kept of this beginning, but for the last token: it must be read to go on from it."""
        path = self._path(ids)
        pages = [self._kept[key].page for key in path]
        tokens = min(sum(len(key[1]) for key in path), len(ids) - 1)
        if not self.keeping or tokens < max(1, min(self.least, len(ids) - tokens)):
            return Found()
        self._touch(path)
        whole, rest = divmod(tokens, self.pool.size)
        return Found(tokens, pages[:whole], pages[whole] if rest else None)

    def keep(self, ids: list[int], pages: list[int]) -> None:
        """Hold these pages, filled with the keys and values of `ids`, besides their present holder."""
        if not self.keeping:
            return
        path, before = [], 0
        for page, tokens in zip(pages, _cut(ids, self.pool.size)):
            key = before, tokens
            if key not in self._kept:
                self.pool.share([page])
                self._numbers += 1
                self._kept[key] = Kept(self._numbers, page)
            path.append(key)
            before = self._kept[key].number
        self._touch(path)

    def evict(self, free: int) -> None:
        """Let go until so many pages are free, or nothing is kept."""
        while self._kept and self.pool.free < free:
            _, oldest = self._kept.popitem(last=False)
            self.pool.give_back([oldest.page])

    def forget(self) -> None:
        """Let all go."""
        self.pool.give_back([kept.page for kept in self._kept.values()])
        self._kept.clear()

    def _path(self, ids: list[int]) -> list[Key]:
        """The pages that hold the longest beginning."""
        path: list[Key] = []
        before, start, size = 0, 0, self.pool.size
        while (key := (before, tuple(ids[start : start + size]))) in self._kept:
            path.append(key)
            before, start = self._kept[key].number, start + len(key[1])
        for length in range(min(size, len(ids) - start) - 1, 0, -1):
            if (key := (before, tuple(ids[start : start + length]))) in self._kept:
                return [*path, key]
        return path

    def _touch(self, path: list[Key]) -> None:
        for key in reversed(path):  # so that a beginning is always younger than its ends
            self._kept.move_to_end(key)


def _cut(ids: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + size]) for start in range(0, len(ids), size))
