"""A running average of the trained weights: average <- decay x average + (1 - decay) x weights, after every step."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from trimtab.train.optimiser import Optimiser
from trimtab.train.tensor_parts import HeldParts, TensorParts


class WeightAverage:
    def __init__(self, optimiser: Optimiser, decay: float):
        self.optimiser, self.decay = optimiser, decay
        self.averages = {name: master.detach().clone() for name, master in optimiser.masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, master in self.optimiser.masters.items():
            self.averages[name].lerp_(master.detach(), 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        return {f"average/{name}": tensor for name, tensor in self.averages.items()}

    def restore(self, saved: TensorParts | HeldParts) -> None:
        for name, tensor in self.averages.items():
            saved.read_into(f"average/{name}", tensor)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Inside, the model's weights are the averages."""
        working = self.optimiser.working
        kept = {name: parameter.detach().clone() for name, parameter in working.items()}
        for name, parameter in working.items():
            parameter.copy_(self.averages[name])
        try:
            yield
        finally:
            for name, parameter in working.items():
                parameter.copy_(kept[name])
