"""KV memory: one tensor of keys and one of values a layer, in pages of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.distributed.device import has_kernels
from trimtab.distributed.memory import free_memory
from trimtab.distributed.peers import Peers
from trimtab.rollout.builtin.prefix_cache import BlockPool, PrefixCache


@dataclass(frozen=True)
class KVShape:
    layers: int  # attention calls of a forward pass: a model may run a layer more than once
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


class KVCache:
    """Keys and values [pages, tokens a page, heads, width] of every layer. Page 0 is for what nobody keeps.

    The two may differ in width: with latent attention keys carry rotary positions besides."""

    def __init__(self, shape: KVShape, pages: int, size: int, device: torch.device):
        self.shape, self.pages, self.size, self.device = shape, pages, size, device
        self.keys, self.values = self._made(pages, shape.key_width), self._made(pages, shape.value_width)

    def grow(self, pages: int) -> None:
        """To so many, with what they hold."""
        widths = {"keys": self.shape.key_width, "values": self.shape.value_width}
        for name, width in widths.items():  # one after the other: each needs its memory twice for a moment
            larger = self._made(pages, width)
            larger[:, : self.pages + 1] = getattr(self, name)
            setattr(self, name, larger)
        self.pages = pages

    def renew(self, pages: int) -> None:
        """With so many, which hold nothing."""
        del self.keys, self.values  # their room first
        self.keys, self.values = self._made(pages, self.shape.key_width), self._made(pages, self.shape.value_width)
        self.pages = pages

    def _made(self, pages: int, width: int) -> Tensor:
        shape = self.shape
        dimensions = (shape.layers, pages + 1, self.size, shape.heads, width)
        return torch.zeros(dimensions, dtype=shape.dtype, device=self.device)

    def store(self, layer: int, keys_THD: Tensor, values_THD: Tensor, places_T: Tensor) -> None:
        """`places_T`: page x size + offset of every token."""
        self.keys[layer].flatten(0, 1).index_copy_(0, places_T, keys_THD)
        self.values[layer].flatten(0, 1).index_copy_(0, places_T, values_THD)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys.device).t()
        for tensor in (self.keys, self.values):
            tensor[:, target] = tensor[:, source]


# ---- How much KV memory the engine has, and what of it is kept between calls.


PAGE_SIZE = 16  # tokens
SHARE_OF_FREE = 0.7  # the rest is for the passes themselves
WORTH_WHILE = 128  # kept tokens: with fewer a prompt is read whole, in one pass with others that are


class KVCacheManager:
    """Memory as given in `tokens`, or planned from what is free; kept until it is released.

    When it is too little it becomes larger where it is: whoever works with the cache, the pool and what is kept has
    the right ones until the release.
    """

    def __init__(self, shape: KVShape, page_size: int, tokens: int | None, tensor: Peers | None = None):
        """`tensor`: processes with parts of the same keys and values, which must all have as many pages."""
        self.shape, self.page_size, self.tokens = shape, page_size, tokens
        self.tensor = tensor or Peers()
        self.release()

    def release(self) -> None:
        self._cache: KVCache | None = None
        self._pages: tuple[BlockPool, PrefixCache] | None = None
        self._wanted = 0  # pages that the cache was made for; it has fewer where memory was short

    def cache(self, samples: int, longest: int, device: torch.device) -> KVCache:
        """For that many samples at once, of at most `longest` tokens. What its pages hold stays, if there is room."""
        wanted = self.wanted(samples, longest)
        if self.tensor.any(self._cache is None):  # each gives its memory back when its own device is full
            self.release()
        if self._cache is not None and self._wanted < wanted and self._cache.pages < self._enough(wanted):
            self._enlarge(self._cache, wanted, free_memory(device))
        if self._cache is None:
            pages = self.pages(samples, longest, free_memory(device))
            self._cache, pool = KVCache(self.shape, pages, self.page_size, device), BlockPool(pages, self.page_size)
            self._pages = pool, PrefixCache(pool, WORTH_WHILE if has_kernels(device) else 0)
        self._wanted = max(self._wanted, wanted)
        return self._cache

    def _enough(self, wanted: int) -> int:
        """Pages, with room for what is kept beside those that are wanted, up to as many again."""
        return wanted + min(self.prefix_cache.num_evictable, wanted)

    def _enlarge(self, cache: KVCache, wanted: int, free: int) -> None:
        # At least twice as many, so that requests that come one by one do not copy all of it every time.
        pages = min(max(wanted, 2 * cache.pages), self._affordable(free))
        if self.pool.num_used > 0 and pages > cache.pages:
            cache.grow(pages)
            self.pool.grow(pages)
        elif (
            self.pool.num_used == self.prefix_cache.num_evictable
        ):  # nobody is at work with it: its own room may be planned anew
            pages = min(wanted, self._affordable(free + self.held))
            if pages > cache.pages:
                self._renew(cache, pages)

    def _renew(self, cache: KVCache, pages: int) -> None:
        assert self._pages is not None
        pool, kept = both = self._pages
        kept.clear()
        self.release()  # there is none, should making it fail
        cache.renew(pages)
        pool.grow(pages)
        self._cache, self._pages = cache, both

    @property
    def pool(self) -> BlockPool:
        assert self._pages is not None
        return self._pages[0]

    @property
    def prefix_cache(self) -> PrefixCache:
        assert self._pages is not None
        return self._pages[1]

    def reset_prefix_cache(self) -> None:
        """What was read and drawn."""
        if self._pages is not None:
            self.prefix_cache.clear()

    def wanted(self, samples: int, longest: int) -> int:
        """Pages, if there is room for them."""
        # Besides its own pages a sample needs, for a moment, the last one of its prompt, which it copies.
        return self._needed(self.tokens) if self.tokens is not None else samples * (self._needed(longest) + 1)

    def pages(self, samples: int, longest: int, free: int) -> int:
        """Pages, where so many bytes are free: what was given is taken, what is planned leaves some."""
        wanted = self.wanted(samples, longest)
        return wanted if self.tokens is not None else min(wanted, self._affordable(free))

    @property
    def page_bytes(self) -> int:
        return self.shape.token_bytes * self.page_size

    @property
    def held(self) -> int:
        """Bytes."""
        return 0 if self._cache is None else self._cache.keys.nbytes + self._cache.values.nbytes

    def _affordable(self, free: int) -> int:
        """Pages, where fewest are: processes may differ in what is free, and in their heads of keys."""
        return self.tensor.minimum(max(0, int(free * SHARE_OF_FREE)) // self.page_bytes)

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
