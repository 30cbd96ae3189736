"""Processes that add up, compare and wait together. One alone does so without any communication."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.distributed.device import widest
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.watch import pulse


@dataclass(frozen=True)
class Peers:
    rank: int = 0  # of this process among them
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # torch's group of them. None: all processes that have met, also after they had to meet again.
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """The one process that speaks and writes for all."""
        return self.rank == 0

    def add_up(self, values: dict[str, Tensor]) -> dict[str, float]:
        """The sum of every figure over all of them, which all then know."""
        if not values:
            return {}
        stacked = torch.stack([self._wide(v.detach()).reshape(()) for v in values.values()])
        return dict(zip(values, self.sum(stacked).tolist()))

    def _wide(self, value: Tensor) -> Tensor:
        """In double precision, in main memory if the device has none."""
        return (value if widest(value.device) == torch.float64 else value.cpu()).double()

    def sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            tensor = tensor.clone()
            with pulse.waiting():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, value: int) -> int:
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        with pulse.waiting():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
            return int(tensor)

    def any(self, holds: bool) -> bool:
        """Whether it holds in one of them."""
        return bool(self.maximum(int(holds)))

    def minimum(self, value: int) -> int:
        return -self.maximum(-value)

    def of_first(self, tensor: Tensor) -> Tensor:
        """The first one's, in all of them."""
        if self.size > 1:
            tensor = tensor.contiguous()
            with pulse.waiting():
                dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The plain values of all of them, in rank order, known to all."""
        if self.size == 1:
            return [value]
        serializer = Serializer()
        message = torch.frombuffer(serializer.pack(value), dtype=torch.uint8)
        longest = self.maximum(len(message))
        messages = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        with pulse.waiting():
            dist.all_gather(messages, torch.nn.functional.pad(message, (0, longest - len(message))), group=self.group)
        return [serializer.unpack(message.numpy()) for message in messages]

    def wait(self) -> None:
        if self.size > 1:
            with pulse.waiting():
                dist.barrier(group=self.group)
