"""The KV cache: tensors of keys and values in pages of tokens, and the manager that sizes them and owns their pages."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.distributed.device import free_memory, has_kernels
from trimtab.distributed.process_group import Peers
from trimtab.rollout.builtin.prefix_cache import BlockPool, PrefixCache


@dataclass(frozen=True)
class KVShape:
    """What the model's attention keeps of a token, and its recurrent layers of a sequence."""

    calls: tuple[tuple[int, int, int], ...]
    """Heads, width of keys and width of values of each attention call of a forward pass. Layers may differ, and a model
    may run a layer more than once."""
    dtype: torch.dtype
    state_bytes: int = 0
    """States of the recurrent layers, whatever the sequence's length."""

    @property
    def token_bytes(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.calls) * self.dtype.itemsize

    @property
    def width(self) -> int | None:
        """Of all keys and values; None: they differ."""
        widths = {width for _, *both in self.calls for width in both}
        return widths.pop() if len(widths) == 1 and len(set(self.calls)) == 1 else None


class KVCache:
    """Keys and values [pages, tokens a page, heads, width] of every layer. Page 0 is for what is not
    needed. Keys and values may differ in width: with latent attention keys also have rotary positions."""

    def __init__(self, shape: KVShape, pages: int, size: int, device: torch.device):
        self.shape, self.pages, self.size, self.device = shape, pages, size, device
        self.tensors = [self._made(shape) for shape in self._shapes()]
        """Layers of one shape have their keys, and their values, in one tensor."""
        self._share()

    def _shapes(self) -> list[tuple[int, ...]]:
        kinds = Counter(self.shape.calls).items()
        return [(count, self.pages + 1, self.size, heads, width) for (heads, *both), count in kinds for width in both]

    def _made(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.shape.dtype, device=self.device)

    def _share(self) -> None:
        """Give every layer its part of the tensors."""
        kinds = dict.fromkeys(self.shape.calls)
        left = {call: zip(*self.tensors[2 * i : 2 * i + 2]) for i, call in enumerate(kinds)}
        both = [next(left[call]) for call in self.shape.calls]
        self.keys, self.values = [keys for keys, _ in both], [values for _, values in both]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def grow(self, pages: int) -> None:
        """To this many pages, with their contents."""
        held, self.pages = self.pages, pages
        self.keys, self.values = [], []
        for i, shape in enumerate(self._shapes()):  # one after the other: each needs its memory twice for a moment
            larger = self._made(shape)
            larger[:, : held + 1] = self.tensors[i]
            self.tensors[i] = larger
        self._share()

    def renew(self, pages: int) -> None:
        """Replace the tensors by empty ones of this many pages."""
        del self.keys, self.values, self.tensors  # free their memory first
        self.pages = pages
        self.tensors = [self._made(shape) for shape in self._shapes()]
        self._share()

    def store(self, layer: int, keys_THD: Tensor, values_THD: Tensor, slot_mapping_T: Tensor) -> None:
        """`slot_mapping_T`: page x size + offset of every token."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping_T, keys_THD)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping_T, values_THD)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.device).t()
        for tensor in self.tensors:
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

    def cache(self, samples: int, longest: int, device: torch.device, states: int | None = None) -> KVCache:
        """For this many sequences at once, of at most `longest` tokens. Contents are kept if there is memory. `states`:
        how many sequences need memory for states of recurrent layers; unset: all."""
        free = free_memory(device) - (samples if states is None else states) * self.shape.state_bytes
        wanted = self.wanted(samples, longest)
        if self.tensor.any(self._cache is None):  # each process releases it when its own device is full
            self.release()
        if self._cache is not None and self._wanted < wanted and self._cache.pages < self._enough(wanted):
            self._enlarge(self._cache, wanted, free)
        if self._cache is None:
            pages = self.pages(samples, longest, free)
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
        return 0 if self._cache is None else self._cache.nbytes

    def _affordable(self, free: int) -> int:
        """Pages, the minimum over the tensor-parallel group: free memory and key heads may differ."""
        return self.tensor.minimum(max(0, int(free * SHARE_OF_FREE)) // max(1, self.page_bytes))

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
