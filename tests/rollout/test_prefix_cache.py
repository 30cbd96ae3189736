"""Kept pages, against a second description of the same: one node for every page."""

import random

import pytest

from trimtab.rollout.builtin.prefix_cache import BlockPool, PrefixCache, PrefixHit

SIZE = 4


class PageByPage:
    """Every page that was kept, by its tokens and all tokens before it; nothing is ever let go."""

    def __init__(self):
        self.known: set[tuple[int, ...]] = set()

    def keep(self, ids: list[int]) -> None:
        self.known |= {tuple(ids[: start + SIZE]) for start in range(0, len(ids), SIZE)}

    def find(self, ids: list[int]) -> int:
        whole = 0
        while len(ids) > whole and tuple(ids[: whole + SIZE]) in self.known:
            whole = min(len(ids), whole + SIZE)
        if whole % SIZE == 0:
            parts = [end for end in range(whole + 1, min(whole + SIZE, len(ids))) if tuple(ids[:end]) in self.known]
            whole = max([whole, *parts])
        return min(whole, len(ids) - 1)


class World:
    """Sequences that come, are read and finish, and what is written into each page."""

    def __init__(self, pages: int, seed: int):
        self.numbers = random.Random(seed)
        self.pool = BlockPool(pages, SIZE)
        self.prefix_cache = PrefixCache(self.pool, 0)
        self.prefix_cache.enabled = True
        self.written: dict[int, list[int]] = {}

    def text(self) -> list[int]:
        """Few tokens, and more of the first: many texts begin alike."""
        return [self.numbers.choice((1, 1, 1, 2)) for _ in range(self.numbers.randrange(1, 6 * SIZE))]

    def check(self, ids: list[int], found: PrefixHit) -> None:
        """That it says what is written."""
        pages = found.pages + ([] if found.tail is None else [found.tail])
        assert len(pages) == self.pool.needed(found.tokens) and found.tokens < len(ids)
        for number, page in enumerate(pages):
            own = ids[number * SIZE : min((number + 1) * SIZE, found.tokens)]
            assert self.written[page][: len(own)] == own

    def finish(self, ids: list[int]) -> bool:
        """Somebody begins with what is kept, writes the rest, and lets the pages be kept; whether there was room."""
        found = self.prefix_cache.lookup(ids)
        self.check(ids, found)
        held = found.pages + ([] if found.tail is None else [found.tail])
        self.pool.share(held)
        wanted = self.pool.needed(len(ids)) - len(found.pages)
        self.prefix_cache.evict(wanted)
        fresh = self.pool.allocate(wanted)
        if fresh is not None:
            pages = found.pages + fresh
            for number, page in enumerate(fresh, start=len(found.pages)):
                self.written[page] = ids[number * SIZE : (number + 1) * SIZE]
            self.prefix_cache.insert(ids, pages)
            self.pool.free(fresh)
        self.pool.free(held)
        return fresh is not None


@pytest.mark.parametrize("seed", range(20))
def test_as_much_is_found_as_page_by_page(seed):
    world, plain = World(10_000, seed), PageByPage()
    for _ in range(120):
        ids = world.text()
        assert world.prefix_cache.lookup(ids).tokens == plain.find(ids)
        assert world.finish(ids)
        plain.keep(ids)
        assert world.prefix_cache.num_evictable == world.pool.num_used == len(plain.known)
    world.prefix_cache.clear()
    assert world.pool.num_used == 0


@pytest.mark.parametrize("seed", range(20))
def test_what_makes_room_is_never_found_again_and_no_page_is_lost(seed):
    world = World(14, seed)
    done = [world.finish(world.text()) for _ in range(300)]
    assert sum(done) > 250
    assert world.prefix_cache.num_evictable == world.pool.num_used > 7
    world.prefix_cache.evict(14)
    assert world.pool.num_used == 0 and world.prefix_cache.lookup([1] * 9) == PrefixHit()


@pytest.mark.parametrize(
    ("free", "old", "new"), [(1, 12, 16), (2, 8, 16), (3, 8, 12), (5, 8, 4), (6, 8, 0), (7, 4, 0), (8, 0, 0)]
)
def test_what_was_used_last_stays_and_the_end_of_a_sequence_goes_before_its_beginning(free, old, new):
    world = World(8, 0)
    for token in (1, 2):
        world.finish([token] * 16)
    assert world.prefix_cache.lookup([1] * 9).tokens == 8  # which uses two pages of the first
    world.prefix_cache.evict(free)
    assert world.pool.num_free == free
    assert [world.prefix_cache.lookup([token] * 17).tokens for token in (1, 2)] == [old, new]
