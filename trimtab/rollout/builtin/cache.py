"""KV memory: one tensor of keys and one of values a layer, in pages of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
