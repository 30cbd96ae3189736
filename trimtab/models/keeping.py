"""Where the weights of a model that only scores are: on the device; in main memory between calls; or split over
processes, which then make equally many passes, because each of them gathers the weights from all."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.models.packed import PackedModel, scoring

Pass = TypeVar("Pass")


@dataclass(frozen=True)
class Keeping:
    device: Device
    mesh: Mesh | None = None  # over whose processes it is split; None: it is not
    offload: bool = False

    def settle(self, model: PackedModel) -> None:
        """After loading."""
        if self._moves:
            model.to("cpu")

    @contextlib.contextmanager
    def at_work(self, model: PackedModel) -> Iterator[None]:
        """The model on the device, ready to score."""
        if self._moves:
            model.to(self.device.torch)
        try:
            with scoring(model):
                yield
        finally:
            if self._moves:
                model.to("cpu")

    def in_step(self, passes: Sequence[Pass], idle: Pass) -> Iterator[Pass]:
        """The passes of this process, and as many idle ones as another one has more."""
        most = len(passes) if self.mesh is None else self.mesh.all.maximum(len(passes))
        yield from passes
        for _ in range(most - len(passes)):
            yield idle

    @property
    def _moves(self) -> bool:
        """A split model that is kept off the device moves by itself."""
        return self.offload and self.mesh is None and self.device.is_accelerator
