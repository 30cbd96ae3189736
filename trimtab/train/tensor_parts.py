"""Tensors on disk in parts: each process writes the rows it holds, and any number of processes reads them back.

One process writes tensors.safetensors; several write tensors-00000-of-00002.safetensors and so on, each file noting
the first row of every part it has. Parts are along the first dimension.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.distributed.sharding import local, part_of
from trimtab.distributed.world import World
from trimtab.files import flush

PATTERN = "tensors*.safetensors"


def write_parts(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """Write what this process holds (what all hold alike, the first process writes), and flush it to disk."""
    held, first_rows = {}, {}
    for name, tensor in tensors.items():
        start, mine = part_of(tensor)
        if mine and (local(tensor) is not tensor or world.leads):
            held[name] = local(tensor).detach().contiguous().cpu()
            first_rows[name] = start
    name = "tensors" if world.size == 1 else f"tensors-{world.rank:05d}-of-{world.size:05d}"
    path = folder / f"{name}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(held, path, metadata={"first_rows": json.dumps(first_rows)})
    flush(path)


class TensorParts:
    """All parts in a folder, read when asked for."""

    def __init__(self, folder: Path):
        paths = sorted(folder.glob(PATTERN))
        promised = int(paths[0].stem.rpartition("-of-")[2]) if paths and "-of-" in paths[0].stem else 1
        if len(paths) != promised:
            raise ValueError(f"{len(paths)} of {promised} parts are there")
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._places: dict[str, list[tuple[int, int]]] = {}
        for index, file in enumerate(self._files):
            first_rows = json.loads((file.metadata() or {}).get("first_rows", "{}"))
            for name in file.keys():  # noqa: SIM118 (not a dict)
                self._places.setdefault(name, []).append((first_rows.get(name, 0), index))
        for places in self._places.values():
            places.sort()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return list(self._places)

    def whole(self, name: str) -> Tensor:
        pieces = [self._files[index].get_tensor(name) for _, index in self._places[name]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor, or this process's part of it, in place."""
        target = local(tensor)
        if target.ndim == 0:
            target.copy_(self.whole(name))
            return
        start, _ = part_of(tensor)
        stop = start + target.shape[0]
        for first, index in self._places[name]:
            piece = self._files[index].get_slice(name)
            rows = piece.get_shape()[0]
            begin, end = max(start, first), min(stop, first + rows)
            if begin < end:
                target[begin - start : end - start].copy_(piece[begin - first : end - first])
