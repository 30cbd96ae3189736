"""Who holds which page of KV memory. Numbers only; the tensors are in cache.py.

Page 0 belongs to nobody: what need not be kept is written there.
"""


class PagePool:
    def __init__(self, pages: int, size: int):
        """`pages` besides page 0, each of `size` tokens."""
        self.size = size
        self.total = pages
        self._free = list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)

    def grow(self, pages: int) -> None:
        """To so many."""
        self._free = [*range(pages, self.total, -1), *self._free]
        self._holders += [0] * (pages - self.total)
        self.total = pages

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """`count` fresh pages, or None if there are not that many."""
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        for page in pages:
            self._holders[page] = 1
        return pages

    def holders(self, page: int) -> int:
        return self._holders[page]

    def share(self, pages: list[int]) -> None:
        """One more holder of each."""
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """One holder fewer of each; a page without holders is free."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0
            if self._holders[page] == 0:
                self._free.append(page)
