"""Tensors on disk in parts: each process writes the rows it holds, and any number of processes reads them back.

One process writes tensors.safetensors; several write tensors-00000-of-00002.safetensors and so on. Parts are along the
first dimension. Every file notes the first row of each part it has, and the shapes of all tensors and the step they are
of, so that parts are known to be all there and to belong together.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.distributed.mesh import Mesh
from trimtab.distributed.sharding import local, part_of
from trimtab.files import flush
from trimtab.train.integrity import write_sum

PATTERN = "tensors*.safetensors"


def write_parts(folder: Path, tensors: dict[str, Tensor], mesh: Mesh, step: int) -> None:
    """Write what this process holds (what all hold alike, the first process writes), and flush it to disk."""
    held, first_rows = {}, {}
    for name, tensor in tensors.items():
        start, mine = part_of(tensor)
        if mine and (local(tensor) is not tensor or mesh.leads):
            held[name] = local(tensor).detach().contiguous().cpu()
            first_rows[name] = start
    name = "tensors" if mesh.size == 1 else f"tensors-{mesh.all.rank:05d}-of-{mesh.size:05d}"
    path = folder / f"{name}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    notes = {"first_rows": json.dumps(first_rows), "shapes": json.dumps(shapes), "step": str(step)}
    save_file(held, path, metadata=notes)
    flush(path)
    write_sum(path)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number that this process holds is finite."""
    for tensor in tensors:
        part = local(tensor).detach()
        # A sum is quick, and finite only if all are; that it overflows is rare enough to look again.
        if part.is_floating_point() and not math.isfinite(part.sum()) and not bool(part.isfinite().all()):
            return False
    return True


class TensorParts:
    """All parts in a folder, read when asked for. ValueError: they are not all there, or of different steps."""

    def __init__(self, folder: Path):
        paths = sorted(folder.glob(PATTERN))
        promised = int(paths[0].stem.rpartition("-of-")[2]) if paths and "-of-" in paths[0].stem else 1
        if len(paths) != promised:
            raise ValueError(f"{len(paths)} of {promised} parts are there")
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._places: dict[str, list[tuple[int, int, int]]] = {}  # first row, end, file
        shapes: dict[str, list[int]] = {}
        steps = set()
        for index, file in enumerate(self._files):
            notes = file.metadata() or {}
            first_rows = json.loads(notes.get("first_rows", "{}"))
            shapes |= json.loads(notes.get("shapes", "{}"))
            steps.add(notes.get("step"))
            for name in file.keys():  # noqa: SIM118 (not a dict)
                first, shape = first_rows.get(name, 0), file.get_slice(name).get_shape()
                self._places.setdefault(name, []).append((first, first + (shape[0] if shape else 1), index))
        if len(steps) > 1:
            raise ValueError(f"its parts are of different steps ({', '.join(sorted(map(str, steps)))})")
        noted = steps.pop()
        self.step = None if noted is None else int(noted)
        for name, places in self._places.items():
            if len(places) > 1:
                places[:] = sorted(place for place in places if place[0] < place[1])  # a process may hold no row
            if [first for first, _, _ in places] != [0, *(end for _, end, _ in places[:-1])]:
                raise ValueError(f"rows of {name} are missing or there twice")
        for name, shape in shapes.items():  # none are noted in checkpoints of earlier versions
            if self._rows(name) != (shape[0] if shape else 1):
                raise ValueError(f"{name} has {self._rows(name)} of {shape[0] if shape else 1} rows")

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return list(self._places)

    def whole(self, name: str) -> Tensor:
        pieces = [self._files[index].get_tensor(name) for _, _, index in self._found(name)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor, or this process's part of it, in place."""
        places, target = self._found(name), local(tensor)
        if target.ndim == 0:
            target.copy_(self.whole(name))
            return
        if self._rows(name) != tensor.shape[0]:
            raise ValueError(f"{name} has {self._rows(name)} of {tensor.shape[0]} rows")
        start, _ = part_of(tensor)
        stop = start + target.shape[0]
        for first, last, index in places:
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                piece = self._files[index].get_slice(name)
                target[begin - start : end - start].copy_(piece[begin - first : end - first])

    def _found(self, name: str) -> list[tuple[int, int, int]]:
        if name not in self._places:
            raise ValueError(f"there is no {name} in it")
        return self._places[name]

    def _rows(self, name: str) -> int:
        return self._found(name)[-1][1]


class HeldParts:
    """The parts of one process, kept in its main memory; for a model that will be split as it was."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = {name: local(tensor).detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def whole(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, tensor: Tensor) -> None:
        local(tensor).copy_(self._tensors[name])
