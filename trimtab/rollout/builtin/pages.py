"""Who holds which page of KV memory. Numbers only; the tensors are in cache.py.

Page 0 belongs to nobody: what need not be kept is written there.
"""

from collections.abc import Sequence


class PagePool:
    def __init__(self, pages: int, size: int):
        """`pages` besides page 0, each of `size` tokens."""
        self.size = size
        self.total = pages
        self._free = list(range(pages, 0, -1))
        self.shared: dict[int, int] = {}  # pages with several holders, and how many; all others that are out have one

    def grow(self, pages: int) -> None:
        """To so many."""
        self._free = [*range(pages, self.total, -1), *self._free]
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
        return pages

    def holders(self, page: int) -> int:
        """Of a page that somebody holds."""
        return self.shared.get(page, 1)

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of each, all of which somebody holds."""
        shared = self.shared
        for page in pages:
            shared[page] = shared.get(page, 1) + 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder fewer of each; a page without holders is free."""
        shared = self.shared
        if shared:
            # Most have one holder, and there are a hundred thousand in a step.
            pages = [page for page in pages if page not in shared or self._let_go(page)]
        self._free += pages
        assert len(self._free) <= self.total, "a page has been given back by more than have held it"

    def _let_go(self, page: int) -> bool:
        """One holder fewer of a page that has several; whether nobody holds it, which cannot be."""
        if self.shared[page] == 2:
            del self.shared[page]
        else:
            self.shared[page] -= 1
        return False
