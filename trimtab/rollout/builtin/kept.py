"""Pages of what was read and drawn before, kept while nobody needs their room. Numbers only, as in pages.py.

A page is known by its tokens and by the page before it; the last one of a sequence may be filled in part. A new prompt
shares the whole pages that it begins with, and copies a last one that it would write into. What was used longest ago
makes room first, and always the end of a sequence before its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.rollout.builtin.pages import PagePool

Tokens = tuple[int, ...]


@dataclass
class Found:
    """The beginning of a prompt, as far as it is kept."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)  # whole ones
    tail: int | None = None  # the page to copy that holds what the whole ones do not

    def without_tail(self, size: int) -> "Found":
        """Only its whole pages, of `size` tokens."""
        return Found(len(self.pages) * size, self.pages)


class Kept:
    """A page, and those that were filled behind it."""

    __slots__ = ("after", "before", "page", "tokens")

    def __init__(self, tokens: Tokens, page: int, before: "Kept | None"):
        self.tokens, self.page, self.before = tokens, page, before
        self.after: dict[Tokens, Kept] = {}


class KeptPages:
    def __init__(self, pool: PagePool, least: int):
        """`least`: tokens that must be saved for it to be worth while, unless they are more than what is left."""
        self.pool, self.least = pool, least
        self.keeping = False
        self._first = Kept((), 0, None)  # before all sequences
        self._order: OrderedDict[Kept, None] = OrderedDict()  # the one used longest ago first
        self._pages: set[int] = set()  # of all of them

    @property
    def alone(self) -> int:
        """Pages that nobody else holds: so many more would be free. Asked at every look, so not counted one by one."""
        return len(self._pages) - len(self._pages.intersection(self.pool.shared))

    def find(self, ids: list[int]) -> Found:
        """What is kept of this beginning, but for the last token: it must be read to go on from it."""
        if not self.keeping:
            return Found()
        path = self._path(ids)
        tokens = min(sum([len(kept.tokens) for kept in path]), len(ids) - 1)
        if tokens < max(1, min(self.least, len(ids) - tokens)):
            return Found()
        self._touch(path)
        whole, rest = divmod(tokens, self.pool.size)
        return Found(tokens, [kept.page for kept in path[:whole]], path[whole].page if rest else None)

    def keep(self, ids: list[int], pages: list[int]) -> None:
        """Hold these pages, filled with the keys and values of `ids`, besides their present holder."""
        if not self.keeping:
            return
        known, new, last, size = [], [], self._first, self.pool.size
        for page, start in zip(pages, range(0, len(ids), size)):
            tokens = tuple(ids[start : start + size])
            kept = last.after.get(tokens)
            if kept is None:
                kept = last.after[tokens] = Kept(tokens, page, last)
                new.append(kept)
            else:
                known.append(kept)
            last = kept
        fresh = [kept.page for kept in new]
        self.pool.share(fresh)
        self._pages.update(fresh)
        self._order.update(dict.fromkeys(reversed(new)))  # behind what is known come only new ones
        self._touch(known)

    def evict(self, free: int) -> None:
        """Let go until so many pages are free, or nothing is kept."""
        missing, gone = free - self.pool.free, []
        while missing > 0 and self._order:
            oldest, _ = self._order.popitem(last=False)
            assert oldest.before is not None
            del oldest.before.after[oldest.tokens]
            gone.append(oldest.page)
            missing -= self.pool.holders(oldest.page) == 1
        self._pages.difference_update(gone)
        self.pool.give_back(gone)

    def forget(self) -> None:
        """Let all go."""
        self.pool.give_back([kept.page for kept in self._order])
        self._first.after.clear()
        self._order.clear()
        self._pages.clear()

    def _path(self, ids: list[int]) -> list[Kept]:
        """The pages that hold the longest beginning."""
        path: list[Kept] = []
        last, start, size = self._first, 0, self.pool.size
        while (kept := last.after.get(tuple(ids[start : start + size]))) is not None:
            path.append(kept)
            last, start = kept, start + len(kept.tokens)
        if last.after:
            for length in range(min(size, len(ids) - start) - 1, 0, -1):
                if (kept := last.after.get(tuple(ids[start : start + length]))) is not None:
                    return [*path, kept]
        return path

    def _touch(self, path: Sequence[Kept]) -> None:
        use = self._order.move_to_end
        for kept in reversed(path):  # so that a beginning is always younger than its ends
            use(kept)
