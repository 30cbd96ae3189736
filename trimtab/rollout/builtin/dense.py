"""Decoding without kernels of our own: the pages of the samples that run, gathered once for a few steps.

To gather them in every step would cost more than attention itself. While the same samples run, their keys and values
lie in one block besides, which each step's new tokens join.
"""

import torch
from torch import Tensor

from trimtab.rollout.builtin.cache import KVCache


class DenseWindow:
    def __init__(self, cache: KVCache, tables_BP: Tensor):
        self.cache, self.tables_BP = cache, tables_BP
        self.width = tables_BP.shape[1] * cache.size
        self.first_B = torch.arange(len(tables_BP), device=tables_BP.device) * self.width
        self._layers: dict[int, list[Tensor]] = {}

    def keys_and_values(self, layer: int, new_BHD: tuple[Tensor, Tensor], positions_B: Tensor) -> list[Tensor]:
        """[B, heads, width, D] each, the new tokens among them."""
        if layer in self._layers:
            places = self.first_B + positions_B
            for block, new in zip(self._layers[layer], new_BHD):
                block.flatten(0, 1).index_copy_(0, places, new)
        else:
            pages = self.tables_BP.flatten()
            self._layers[layer] = [
                tensor[layer].index_select(0, pages).view(len(self.tables_BP), self.width, *tensor.shape[3:])
                for tensor in (self.cache.keys, self.cache.values)
            ]
        return [block.transpose(1, 2) for block in self._layers[layer]]
