"""What a device allows: its measured matrix and memory rates, and the least a piece of work can take at them.

Products count as multiply-adds that training cannot do without: a forward pass of the layers for every token, of the
head for every trained token, of attention for every pair of tokens that see each other; backward twice as much.
Recomputation is not work: a run that recomputes has a smaller share. Decoding reads all weights and the keys and values
of all rows at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from shapes import Shape


@dataclass(frozen=True)
class Rates:
    products: float
    """Of a bf16 matrix product, FLOP/s."""
    memory: float
    """Of a copy, bytes read and written a second."""

    @classmethod
    def measured(cls, device: torch.device, tiny: bool) -> "Rates":
        size, count = (32, 1 << 16) if tiny else (8192, 1 << 32)
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        source = torch.empty(count, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        found = cls(
            2 * size**3 / seconds_of(lambda: a @ b, device),
            2 * count / seconds_of(lambda: target.copy_(source), device),
        )
        print(f"device: {found.products / 1e12:.0f} TFLOP/s, {found.memory / 1e12:.2f} TB/s", flush=True)
        return found

    def update(self, shape: Shape, lengths: list[int], trained: int, *, passes: float = 3.0) -> float:
        """Least seconds to train on sequences of these lengths, of which `trained` tokens carry loss."""
        return passes * forward_products(shape, lengths, trained) / self.products

    def decoding(self, shape: Shape, rows: int, prompt: int, new: int) -> float:
        """Least seconds to draw `new` tokens in each of `rows` rows."""
        weights = 2 * (shape.layer_weights + shape.head_weights)
        step = weights + rows * shape.cache_bytes * (prompt + new / 2)
        by_bytes = step / self.memory
        by_products = 2 * rows * (shape.layer_weights + shape.head_weights) / self.products
        return new * max(by_bytes, by_products)


def forward_products(shape: Shape, lengths: list[int], trained: int) -> float:
    seen = sum(length * (length + 1) / 2 for length in lengths)
    attention = 4 * shape.num_hidden_layers * shape.hidden_size * seen
    return 2 * shape.layer_weights * sum(lengths) + 2 * shape.head_weights * trained + attention


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median seconds of a short piece of device work."""
    from runs import median, timed

    work()
    return median([timed(lambda: [work() for _ in range(3)], device)[1] / 3 for _ in range(repeats)])
