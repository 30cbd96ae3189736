"""Is a checkpoint what was written? Checksums of its files, made when written and compared when read.

A file's checksum is the sum of its 64-bit words over each of its pieces of 1 MiB, and CRC-32 over these sums and what
is left at the end: as quick as memory is, where a CRC of everything would take longer than reading the tensors.
It finds what disks, copies and hands do to a file; it is no defence against someone who wants to deceive.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 2**20  # bytes
SUM = ".sum"  # after a file's name: its checksum, until the leader has taken it into the checkpoint's state
SEAL, STEP, PARTS = "checksum", "step", "parts"


def checksum(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    if (size := path.stat().st_size) == 0:
        return {"bytes": 0, "sums": "00000000"}
    content = np.memmap(path, dtype=np.uint8, mode="r")
    whole = size // PIECE * PIECE
    sums = content[:whole].view(np.uint64).reshape(-1, PIECE // 8).sum(axis=1, dtype=np.uint64)
    return {"bytes": size, "sums": f"{zlib.crc32(content[whole:], zlib.crc32(sums.tobytes())):08x}"}


def write_sum(path: Path) -> None:
    path.with_name(path.name + SUM).write_text(json.dumps(checksum(path)))


def take_sums(folder: Path) -> dict[str, dict]:
    """The checksums that processes left beside the files they wrote, by the files' place in the folder."""
    sums = {}
    for path in sorted(folder.rglob(f"*{SUM}")):
        sums[str(path.relative_to(folder)).removesuffix(SUM)] = json.loads(path.read_text())
        path.unlink()
    return sums


def sealed(state: dict, step: int, parts: dict[str, dict]) -> str:
    """A checkpoint's state as text that tells whether it was changed."""
    state = {**state, STEP: step, PARTS: parts}
    return json.dumps({SEAL: _digest(state), **state})


def unsealed(text: str, step: int) -> dict:
    """The state of the checkpoint of `step`; ValueError where it is not what was written.

    Checkpoints of earlier versions have no seal: of them only the form is looked at.
    """
    state = json.loads(text)
    if not isinstance(state, dict):
        raise ValueError("state.json holds no object")
    seal = state.pop(SEAL, None)
    if seal is not None and seal != _digest(state):
        raise ValueError("state.json is not what was written: its checksum differs")
    for name, kind in (("counters", dict), ("manifest", dict), ("random", list | dict)):
        if not isinstance(state.get(name), kind):
            raise ValueError(f"state.json has no {name}")
    counters = state["counters"]
    if counters.get("step", counters.get("iteration")) != step or state.get(STEP, step) != step:
        raise ValueError("state.json is of another step")
    return state


def is_sealed(state: dict) -> bool:
    return PARTS in state


def damage(folder: Path, parts: Iterable[tuple[str, dict]]) -> str | None:
    """What is wrong with the first of these files that is not what was written."""
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
