"""Who holds which page of KV memory. Numbers only; the tensors are in cache.py.

Page 0 belongs to nobody: what need not be kept is written there.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class BlockPool:
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
        """Of a page that somebody holds."""
        return self.shared.get(page, 1)

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of each, all of which somebody holds."""
        shared = self.shared
        for page in pages:
            shared[page] = shared.get(page, 1) + 1

    def free(self, pages: Sequence[int]) -> None:
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


# ---- Pages of what was read and drawn before, kept while nobody needs their room. Numbers only, as in pages.py. A
# page is known by its tokens and by the pages before it; the last one of a sequence may be filled in part. A new
# prompt shares the whole pages that it begins with, and copies a last one that it would write into. What was used
# longest ago makes room first, and always the end of a sequence before its beginning. Sequences are long, and most of
# them meet no other: pages that always follow each other are one run. Where two sequences part, or a prompt goes
# along with one for a while, the run is split.


TOKEN = array("i").itemsize  # bytes


@dataclass
class PrefixHit:
    """The beginning of a prompt, as far as it is kept."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)  # whole ones
    tail: int | None = None  # the page to copy that holds what the whole ones do not

    def without_tail(self, size: int) -> "PrefixHit":
        """Only its whole pages, of `size` tokens."""
        return PrefixHit(len(self.pages) * size, self.pages)


class Node:
    """Pages one behind the other with their tokens, as bytes, and the runs that were filled behind them: each by what
    is in its first page."""

    __slots__ = ("after", "before", "pages", "tokens")

    def __init__(self, tokens: bytes, pages: list[int], before: "Node | None"):
        self.tokens, self.pages, self.before = tokens, pages, before
        self.after: dict[bytes, Node] = {}


class PrefixCache:
    def __init__(self, pool: BlockPool, least: int):
        """`least`: tokens that must be saved for it to be worth while, unless they are more than what is left."""
        self.pool, self.least = pool, least
        self.enabled = False
        self._page = pool.size * TOKEN
        self._first = Node(b"", [], None)  # before all sequences
        self._order: OrderedDict[Node, None] = OrderedDict()  # the one used longest ago first
        self._pages: set[int] = set()  # of all of them

    @property
    def num_evictable(self) -> int:
        """Pages that nobody else holds: so many more would be free. Asked at every look, so not counted one by one."""
        return len(self._pages) - len(self._pages.intersection(self.pool.shared))

    def lookup(self, ids: list[int]) -> PrefixHit:
        """What is kept of this beginning, but for the last token: it must be read to go on from it."""
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
        """Hold these pages, filled with the keys and values of `ids`, besides their present holder."""
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
        """Let go until so many pages are free, or nothing is kept."""
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
        """Let all go."""
        self.pool.free([page for run in self._order for page in run.pages])
        self._first.after.clear()
        self._order.clear()
        self._pages.clear()

    def _path(self, text: bytes, *, whole: bool = False) -> tuple[list[Node], int]:
        """The runs that this text begins with, the last one split where they part, and how many bytes they hold. A page
        that is filled in part ends it; `whole`: and is in it only where the text ends there too."""
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
        """Bytes of a run that a text has too, which begins with the same page: all of it, or whole pages."""
        if tokens == others:
            return len(tokens)
        pages = min(len(tokens), len(others)) // self._page
        both = [np.frombuffer(side, np.uint8, pages * self._page).reshape(pages, -1) for side in (tokens, others)]
        differ = (both[0] != both[1]).any(1)
        return self._page * (int(differ.argmax()) if differ.any() else pages)

    def _part_of_a_page(self, path: list[Node], text: bytes) -> Node | None:
        """A page that is filled in part with what comes next in the text."""
        after = (path[-1] if path else self._first).after
        lengths = range(len(text) - TOKEN, 0, -TOKEN) if after else ()
        return next((after[text[:length]] for length in lengths if text[:length] in after), None)

    def _split(self, run: Node, at: int) -> Node:
        """The beginning of a run, up to this byte, as a run of its own."""
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
        for run in reversed(path):  # so that a beginning is always younger than its ends
            use(run)
