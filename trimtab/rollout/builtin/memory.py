"""How much KV memory a call gets, and who keeps it between calls."""

import torch

from trimtab.distributed.device import free_memory
from trimtab.rollout.builtin.cache import KVCache, KVShape

PAGE_SIZE = 16  # tokens
SHARE_OF_FREE = 0.7  # the rest is for the passes themselves


class KVMemory:
    """Memory as given in `tokens`, or planned from what is free; kept until it is too little, or released."""

    def __init__(self, shape: KVShape, page_size: int, tokens: int | None):
        self.shape, self.page_size, self.tokens = shape, page_size, tokens
        self._cache: KVCache | None = None
        self._wanted = 0  # pages that the kept cache was made for; it has fewer where memory was short

    def cache(self, samples: int, longest: int, device: torch.device) -> KVCache:
        """For that many samples at once, of at most `longest` tokens."""
        wanted = self.wanted(samples, longest)
        if self._cache is None or self._wanted < wanted:
            self.release()
            pages = self.pages(samples, longest, free_memory(device))
            self._cache, self._wanted = KVCache(self.shape, pages, self.page_size, device), wanted
        return self._cache

    def wanted(self, samples: int, longest: int) -> int:
        """Pages, if there is room for them."""
        # Besides its own pages a sample needs, for a moment, the last one of its prompt, which it copies.
        return self._pages(self.tokens) if self.tokens is not None else samples * (self._pages(longest) + 1)

    def pages(self, samples: int, longest: int, free: int) -> int:
        """Pages, where so many bytes are free: what was given is taken, what is planned leaves some."""
        wanted = self.wanted(samples, longest)
        if self.tokens is not None:
            return wanted
        return max(0, min(wanted, int(free * SHARE_OF_FREE) // self.page_bytes))

    @property
    def page_bytes(self) -> int:
        return self.shape.token_bytes * self.page_size

    @property
    def held(self) -> int:
        """Bytes."""
        return 0 if self._cache is None else 2 * self._cache.keys.nbytes

    def release(self) -> None:
        self._cache, self._wanted = None, 0

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
