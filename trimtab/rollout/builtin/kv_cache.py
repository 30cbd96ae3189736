"""The KV cache: tensors of keys and values in pages of tokens, and the manager that sizes them and owns their pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.distributed.device import free_memory, has_kernels
from trimtab.distributed.process_group import Peers
from trimtab.rollout.builtin.prefix_cache import BlockPool, PrefixCache


@dataclass(frozen=True)
class KVShape:
    """What the model's attention keeps of a token."""

    layers: int  # attention calls of a forward pass: a model may run a layer more than once
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


class KVCache:
    """Keys and values [pages, tokens a page, heads, width] of every layer. Page 0 is for what is not
    needed. Keys and values may differ in width: with latent attention keys also have rotary positions."""

    def __init__(self, shape: KVShape, pages: int, size: int, device: torch.device):
        self.shape, self.pages, self.size, self.device = shape, pages, size, device
        self.keys, self.values = self._made(pages, shape.key_width), self._made(pages, shape.value_width)

    def grow(self, pages: int) -> None:
        """To this many pages, with their contents."""
        widths = {"keys": self.shape.key_width, "values": self.shape.value_width}
        for name, width in widths.items():  # one after the other: each needs its memory twice for a moment
            larger = self._made(pages, width)
            larger[:, : self.pages + 1] = getattr(self, name)
            setattr(self, name, larger)
        self.pages = pages

    def renew(self, pages: int) -> None:
        """Replace the tensors by empty ones of this many pages."""
        del self.keys, self.values  # free their memory first
        self.keys, self.values = self._made(pages, self.shape.key_width), self._made(pages, self.shape.value_width)
        self.pages = pages

    def _made(self, pages: int, width: int) -> Tensor:
        shape = self.shape
        dimensions = (shape.layers, pages + 1, self.size, shape.heads, width)
        return torch.zeros(dimensions, dtype=shape.dtype, device=self.device)

    def store(self, layer: int, keys_THD: Tensor, values_THD: Tensor, slot_mapping_T: Tensor) -> None:
        """`slot_mapping_T`: page x size + offset of every token."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping_T, keys_THD)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping_T, values_THD)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys.device).t()
        for tensor in (self.keys, self.values):
            tensor[:, target] = tensor[:, source]


PAGE_SIZE = 16  # tokens
SHARE_OF_FREE = 0.7  # of free memory; the rest is for the forward passes
MIN_PREFIX_HIT = 128  # tokens: with fewer a prompt is prefilled whole, in one pass with other whole ones


class KVCacheManager:
    """Sizes the KV cache, by `tokens` or by free memory, and owns it, its block pool and prefix cache until `release`.

    A cache that is too small grows in place, so references to these objects stay valid until the release.
    """

    def __init__(self, shape: KVShape, page_size: int, tokens: int | None, tensor: Peers | None = None):
        """`tensor`: the tensor-parallel group, whose processes must all have the same number of pages."""
        self.shape, self.page_size, self.tokens = shape, page_size, tokens
        self.tensor = tensor or Peers()
        self.release()

    def release(self) -> None:
        self._cache: KVCache | None = None
        self._pages: tuple[BlockPool, PrefixCache] | None = None
        self._wanted = 0  # pages that the cache was planned for; it has fewer if memory was short

    def cache(self, samples: int, longest: int, device: torch.device) -> KVCache:
        """For this many sequences at once, of at most `longest` tokens. Contents are kept if there is memory."""
        wanted = self.wanted(samples, longest)
        if self.tensor.any(self._cache is None):  # each process releases it when its own device is full
            self.release()
        if self._cache is not None and self._wanted < wanted and self._cache.pages < self._enough(wanted):
            self._enlarge(self._cache, wanted, free_memory(device))
        if self._cache is None:
            pages = self.pages(samples, longest, free_memory(device))
            self._cache, pool = KVCache(self.shape, pages, self.page_size, device), BlockPool(pages, self.page_size)
            self._pages = pool, PrefixCache(pool, MIN_PREFIX_HIT if has_kernels(device) else 0)
        self._wanted = max(self._wanted, wanted)
        return self._cache

    def _enough(self, wanted: int) -> int:
        """Pages, with room for cached prefixes, up to as many as are wanted."""
        return wanted + min(self.prefix_cache.num_evictable, wanted)

    def _enlarge(self, cache: KVCache, wanted: int, free: int) -> None:
        # At least double, so that requests that come one by one do not copy everything each time.
        pages = min(max(wanted, 2 * cache.pages), self._affordable(free))
        if self.pool.num_used > 0 and pages > cache.pages:
            cache.grow(pages)
            self.pool.grow(pages)
        elif self.pool.num_used == self.prefix_cache.num_evictable:  # no sequence uses it: plan with its memory, too
            pages = min(wanted, self._affordable(free + self.held))
            if pages > cache.pages:
                self._renew(cache, pages)

    def _renew(self, cache: KVCache, pages: int) -> None:
        assert self._pages is not None
        pool, kept = both = self._pages
        kept.clear()
        self.release()  # so that there is none if the allocation fails
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
        """Forget all prompts and answers."""
        if self._pages is not None:
            self.prefix_cache.clear()

    def wanted(self, samples: int, longest: int) -> int:
        """Pages, if there is memory for them."""
        # Besides its own pages a sequence needs, for a moment, the last one of its prompt, which it copies.
        return self._needed(self.tokens) if self.tokens is not None else samples * (self._needed(longest) + 1)

    def pages(self, samples: int, longest: int, free: int) -> int:
        """Pages, if this many bytes are free."""
        wanted = self.wanted(samples, longest)
        return wanted if self.tokens is not None else min(wanted, self._affordable(free))

    @property
    def page_bytes(self) -> int:
        return self.shape.token_bytes * self.page_size

    @property
    def held(self) -> int:
        """Bytes of the tensors."""
        return 0 if self._cache is None else self._cache.keys.nbytes + self._cache.values.nbytes

    def _affordable(self, free: int) -> int:
        """Pages, the minimum over the tensor-parallel group: free memory and key heads may differ."""
        return self.tensor.minimum(max(0, int(free * SHARE_OF_FREE)) // self.page_bytes)

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
