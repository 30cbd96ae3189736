"""Block pool and prefix cache (a radix tree): which pages of the KV cache are in use, which a later prompt can share.

Numbers only; the tensors are in kv_cache.py. Page 0 belongs to no sequence: keys and values that are not needed are
written there.

The prefix cache is a radix tree over the tokens of pages. A page is identified by its tokens and by the pages before
it; the last page of a sequence may be partially filled. A new prompt shares the full pages of its prefix, and copies a
partially filled one, because it will write into it. Eviction is least recently used first, and always the end of a
sequence before its beginning. Most sequences share nothing with others, so a node holds a run of consecutive pages, and
is split where a second sequence branches off.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class BlockPool:
    """Free pages, and reference counts of those in use."""

    def __init__(self, pages: int, size: int):
        """`pages` besides page 0, each of `size` tokens."""
        self.size = size
        self.total = pages
        self._free = list(range(pages, 0, -1))
        self.shared: dict[int, int] = {}  # reference counts above 1; all other pages in use have 1

    def grow(self, pages: int) -> None:
        """To this many pages."""
        self._free = [*range(pages, self.total, -1), *self._free]
        self.total = pages

    @property
    def num_used(self) -> int:
        return self.total - self.num_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` fresh pages, or None if there are not that many."""
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return pages

    def holders(self, page: int) -> int:
        """Reference count of a page in use."""
        return self.shared.get(page, 1)

    def share(self, pages: Sequence[int]) -> None:
        """Increment the reference counts of pages in use."""
        shared = self.shared
        for page in pages:
            shared[page] = shared.get(page, 1) + 1

    def free(self, pages: Sequence[int]) -> None:
        """Decrement the reference counts; pages that reach 0 are free."""
        shared = self.shared
        if shared:
            # Most have a count of 1, and there are a hundred thousand in a step.
            pages = [page for page in pages if page not in shared or self._decrement(page)]
        self._free += pages
        assert len(self._free) <= self.total, "a page was freed more often than it was allocated and shared"

    def _decrement(self, page: int) -> bool:
        """Of a count above 1; returns whether the page is free now, which is never."""
        if self.shared[page] == 2:
            del self.shared[page]
        else:
            self.shared[page] -= 1
        return False


TOKEN = array("i").itemsize  # bytes


@dataclass
class PrefixHit:
    """The cached prefix of a prompt."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)  # full ones
    tail: int | None = None  # a partially filled page, to be copied


class Node:
    """A node of the radix tree: consecutive pages with their tokens, as bytes. Children (`after`) are found by the
    tokens of their first page."""

    __slots__ = ("after", "before", "pages", "tokens")

    def __init__(self, tokens: bytes, pages: list[int], before: "Node | None"):
        self.tokens, self.pages, self.before = tokens, pages, before
        self.after: dict[bytes, Node] = {}


class PrefixCache:
    """Pages of earlier prompts and answers, kept until they are evicted."""

    def __init__(self, pool: BlockPool, least: int):
        """`least`: a shorter hit is not used, unless it covers at least half of the prompt."""
        self.pool, self.least = pool, least
        self.enabled = False
        self._page = pool.size * TOKEN
        self._first = Node(b"", [], None)  # the root
        self._order: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._pages: set[int] = set()  # of all of them

    @property
    def num_evictable(self) -> int:
        """Pages that only the cache references. Read before every decode chunk, so not counted one by one."""
        return len(self._pages) - len(self._pages.intersection(self.pool.shared))

    def lookup(self, ids: list[int]) -> PrefixHit:
        """The cached prefix of these tokens, without the last one: its hidden state is needed to sample."""
        if not self.enabled:
            return PrefixHit()
        text = array("i", ids).tobytes()
        path, reached = self._path(text)
        if reached % self._page == 0 and (tail := self._part_of_a_page(path, text[reached : reached + self._page])):
            path.append(tail)
            reached += len(tail.tokens)
        self._touch(path)
        tokens = min(reached // TOKEN, len(ids) - 1)
        if tokens < max(1, min(self.least, len(ids) - tokens)):
            return PrefixHit()
        whole, rest = divmod(tokens, self.pool.size)
        pages = [page for run in path for page in run.pages]
        return PrefixHit(tokens, pages[:whole], pages[whole] if rest else None)

    def insert(self, ids: list[int], pages: list[int]) -> None:
        """Add a reference to these pages, filled with the keys and values of `ids`."""
        if not self.enabled:
            return
        text = array("i", ids[: len(pages) * self.pool.size]).tobytes()
        path, reached = self._path(text, whole=True)
        if reached < len(text):
            before = path[-1] if path else self._first
            new = pages[reached // self._page : -(-len(text) // self._page)]
            self._join(Node(text[reached:], new, before), before)
            self.pool.share(new)
            self._pages.update(new)
        self._touch(path)

    def evict(self, free: int) -> None:
        """Evict until `free` pages are free, or the cache is empty."""
        missing, gone = free - self.pool.num_free, []
        while missing > 0 and self._order:
            oldest = next(iter(self._order))
            assert oldest.before is not None and not oldest.after
            first = oldest.tokens[: self._page]
            while oldest.pages and missing > 0:
                gone.append(oldest.pages.pop())
                missing -= self.pool.holders(gone[-1]) == 1
            oldest.tokens = oldest.tokens[: len(oldest.pages) * self._page]
            if not oldest.pages:
                del self._order[oldest], oldest.before.after[first]
        self._pages.difference_update(gone)
        self.pool.free(gone)

    def clear(self) -> None:
        """Evict everything."""
        self.pool.free([page for run in self._order for page in run.pages])
        self._first.after.clear()
        self._order.clear()
        self._pages.clear()

    def _path(self, text: bytes, *, whole: bool = False) -> tuple[list[Node], int]:
        """The nodes that this text begins with, the last one split where they differ, and their length in bytes. A
        partially filled page ends the path; `whole`: and is part of it only if the text ends there too."""
        path: list[Node] = []
        last, start, page = self._first, 0, self._page
        while start % page == 0 and (run := last.after.get(text[start : start + page])) is not None:
            same = self._same(run.tokens, text[start : start + len(run.tokens)])
            if whole and same % page and start + same < len(text):
                same -= same % page
            if same < len(run.tokens):
                run = self._split(run, same)
            path.append(run)
            last, start = run, start + same
        return path, start

    def _same(self, tokens: bytes, others: bytes) -> int:
        """Common prefix of a node and a text with the same first page, in bytes: the whole node, or full pages."""
        if tokens == others:
            return len(tokens)
        pages = min(len(tokens), len(others)) // self._page
        both = [np.frombuffer(side, np.uint8, pages * self._page).reshape(pages, -1) for side in (tokens, others)]
        differ = (both[0] != both[1]).any(1)
        return self._page * (int(differ.argmax()) if differ.any() else pages)

    def _part_of_a_page(self, path: list[Node], text: bytes) -> Node | None:
        """A partially filled page with the next tokens of the text."""
        after = (path[-1] if path else self._first).after
        lengths = range(len(text) - TOKEN, 0, -TOKEN) if after else ()
        return next((after[text[:length]] for length in lengths if text[:length] in after), None)

    def _split(self, run: Node, at: int) -> Node:
        """Split a node at this byte; returns the new node of its beginning."""
        assert run.before is not None
        count = at // self._page
        beginning = Node(run.tokens[:at], run.pages[:count], run.before)
        self._join(beginning, run.before)
        run.tokens, run.pages, run.before = run.tokens[at:], run.pages[count:], beginning
        beginning.after[run.tokens[: self._page]] = run
        return beginning

    def _join(self, run: Node, before: Node) -> None:
        before.after[run.tokens[: self._page]] = run
        self._order[run] = None

    def _touch(self, path: Sequence[Node]) -> None:
        use = self._order.move_to_end
        for run in reversed(path):  # a prefix is always used more recently than what follows it
            use(run)
