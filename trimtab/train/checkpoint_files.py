"""The files of a checkpoint: tensors in parts, checksums of all files, and the sealed state.

Each process writes the blocks of the tensors it holds, and any number of processes with any sharding can read them
back. One process writes tensors.safetensors; several write
tensors-00000-of-00002.safetensors and so on. The metadata of every file lists its blocks of each tensor, the shapes of
all tensors and the step, so that missing and mixed parts are detected.

A file's checksum sums the 64-bit words of each piece of 1 MiB, and takes the CRC-32 of these sums and of the remaining
bytes. It runs at memory speed; a CRC of the whole file would take longer than reading the tensors. It detects damage by
disks, copies and manual edits; it is no protection against deliberate forgery.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.distributed.fsdp import Block, Slices, blocks_of, is_first_holder, is_partition, local, whole_block
from trimtab.distributed.mesh import Mesh
from trimtab.files import flush

PIECE = 2**20  # bytes
SUM = ".sum"  # suffix of the file with a checksum, until rank 0 has copied it into the checkpoint's state
SEAL, STEP, PARTS = "checksum", "step", "parts"


def checksum(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    if (size := path.stat().st_size) == 0:
        return {"bytes": 0, "sums": "00000000"}
    content = np.memmap(path, dtype=np.uint8, mode="r")
    whole = size // PIECE * PIECE
    sums = content[:whole].view(np.uint64).reshape(-1, PIECE // 8).sum(axis=1, dtype=np.uint64)
    return {"bytes": size, "sums": f"{zlib.crc32(content[whole:], zlib.crc32(sums.tobytes())):08x}"}


def write_checksum(path: Path) -> None:
    path.with_name(path.name + SUM).write_text(json.dumps(checksum(path)))


def collect_checksums(folder: Path) -> dict[str, dict]:
    """Read and remove the checksum files of all processes; keys are paths relative to the folder."""
    sums = {}
    for path in sorted(folder.rglob(f"*{SUM}")):
        sums[str(path.relative_to(folder)).removesuffix(SUM)] = json.loads(path.read_text())
        path.unlink()
    return sums


def seal_state(state: dict, step: int, parts: dict[str, dict]) -> str:
    """A checkpoint's state as JSON with a checksum of itself."""
    state = {**state, STEP: step, PARTS: parts}
    return json.dumps({SEAL: _digest(state), **state})


def unseal_state(text: str, step: int) -> dict:
    """Parse and verify the state of the checkpoint of `step`. ValueError: it was changed, or is incomplete."""
    state = json.loads(text)
    if not isinstance(state, dict):
        raise ValueError("state.json holds no object")
    if state.pop(SEAL, None) != _digest(state):
        raise ValueError("state.json is not what was written: its checksum differs")
    for name, kind in (("counters", dict), ("manifest", dict), ("random", list | dict)):
        if not isinstance(state.get(name), kind):
            raise ValueError(f"state.json has no {name}")
    counters = state["counters"]
    if counters.get("step", counters.get("iteration")) != step or state.get(STEP) != step:
        raise ValueError("state.json is of another step")
    return state


def find_damage(folder: Path, parts: Iterable[tuple[str, dict]]) -> str | None:
    """Describe the first of these files that is missing or differs from its checksum; None if all are intact."""
    for name, expected in parts:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected.get("bytes"):
            return f"{name} has {path.stat().st_size} bytes instead of {expected.get('bytes')}"
        if checksum(path) != expected:
            return f"{name} is not what was written: its checksum differs"
    return None


def _digest(state: dict) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


# ---- tensors in parts


PATTERN = "tensors*.safetensors"


def write_sharded(folder: Path, tensors: dict[str, Tensor], mesh: Mesh, step: int) -> None:
    """Write this process's parts of the tensors and flush them to disk; rank 0 writes replicated tensors."""
    held = {
        name: tensor
        for name, tensor in tensors.items()
        if is_first_holder(tensor) and (local(tensor) is not tensor or mesh.is_rank_zero)
    }
    name = "tensors" if mesh.size == 1 else f"tensors-{mesh.all.rank:05d}-of-{mesh.size:05d}"
    path = folder / f"{name}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    write_file(
        path,
        {name: local(tensor).detach().contiguous().cpu() for name, tensor in held.items()},
        {name: blocks_of(tensor) for name, tensor in held.items()},
        {name: list(tensor.shape) for name, tensor in tensors.items()},
        step,
    )
    flush(path)
    write_checksum(path)


def write_file(
    path: Path, parts: dict[str, Tensor], blocks: dict[str, list[Block]], shapes: dict[str, list[int]], step: int
) -> None:
    """Write one process's parts and the blocks they fill. `shapes` covers all tensors, also those without a part
    here."""
    notes = {"blocks": json.dumps(blocks), "shapes": json.dumps(shapes), "step": str(step)}
    save_file(parts, path, metadata=notes)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values in this process's parts are finite."""
    for tensor in tensors:
        part = local(tensor).detach()
        # A sum is fast, and not finite if any value is not. It may also overflow, so the slow check confirms.
        if part.is_floating_point() and not math.isfinite(part.sum()) and not bool(part.isfinite().all()):
            return False
    return True


class ShardedTensors:
    """The sharded tensors of a folder, read lazily. ValueError: parts are missing, overlap, or differ in step."""

    def __init__(self, folder: Path):
        paths = sorted(folder.glob(PATTERN))
        promised = int(paths[0].stem.rpartition("-of-")[2]) if paths and "-of-" in paths[0].stem else 1
        if len(paths) != promised:
            raise ValueError(f"{len(paths)} of {promised} parts are there")
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._places: dict[str, list[tuple[Block, int]]] = {}  # blocks of each tensor, with the index of their file
        self._shapes: dict[str, list[int]] = {}
        steps = set()
        for index, file in enumerate(self._files):
            notes = file.metadata() or {}
            self._shapes |= json.loads(notes["shapes"])
            steps.add(notes["step"])
            for name, blocks in _blocks_in(file, notes):
                self._places.setdefault(name, []).extend((block, index) for block in blocks)
        if len(steps) > 1:
            raise ValueError(f"its parts are of different steps ({', '.join(sorted(steps))})")
        self.step = int(steps.pop())
        for name, shape in self._shapes.items():
            blocks = [block for block, _ in self._found(name)]
            if not is_partition(blocks, shape):
                here, needed = sum(block.size for block in blocks), math.prod(shape)
                short = f"{name} has {here:,} of {needed:,} numbers"
                raise ValueError(short if here != needed else f"parts of {name} overlap or lie outside of it")

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return list(self._places)

    def whole(self, name: str) -> Tensor:
        (_, index), *more = self._found(name)
        if not more:
            return self._files[index].get_tensor(name)
        tensor = torch.empty(self._shapes[name], dtype=self._files[index].get_slice(name)[:0].dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Copy a stored tensor into `tensor`, or into this process's part of it, in place."""
        places, target = self._found(name), local(tensor)
        found, wanted = self._shapes[name], list(tensor.shape)
        if found != wanted:
            few = found[1:] == wanted[1:] and found and wanted
            raise ValueError(
                f"{name} has {found[0]} of {wanted[0]} rows" if few else f"{name} has shape {found}, not {wanted}"
            )
        for own in blocks_of(tensor):
            for block, index in places:
                if (both := own.common(block)) is not None:
                    here, there = both
                    target[here].copy_(self._read(index, name, there))

    def _read(self, index: int, name: str, where: Slices) -> Tensor:
        return self._files[index].get_slice(name)[where] if where else self._files[index].get_tensor(name)

    def _found(self, name: str) -> list[tuple[Block, int]]:
        if name not in self._places:
            raise ValueError(f"there is no {name} in it")
        return self._places[name]


def _blocks_in(file: Any, notes: dict[str, str]) -> Iterator[tuple[str, list[Block]]]:
    """The blocks of each tensor that a file's metadata lists, checked against the stored shapes."""
    noted = json.loads(notes["blocks"])
    for name in file.keys():  # noqa: SIM118 (not a dict)
        stored = whole_block(file.get_slice(name).get_shape())
        blocks = [Block(*map(tuple, block)) for block in noted[name]]
        if not is_partition([block._replace(offsets=block.place) for block in blocks], stored.lengths):
            raise ValueError(f"its parts of {name} are not those that it names")
        yield name, blocks or [stored]


class HostTensors:
    """A copy of this process's parts in main memory, for a model that is rebuilt with the same sharding."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = {name: local(tensor).detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def whole(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, tensor: Tensor) -> None:
        local(tensor).copy_(self._tensors[name])
