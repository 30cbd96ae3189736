"""The safetensors files of a model: what is in them, without reading it, and any part of it."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from trimtab.data.hub import hub_or_cache
from trimtab.models.fingerprint import OF_FILES
from trimtab.models.hugging_face import safetensors_files, told

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WINDOWS, WINDOW = 16, 4096  # of each tensor so many pieces of so many bytes tell it from another, and are read at once


class WeightFiles:
    def __init__(self, paths: list[Path]):
        self.paths = paths
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in paths:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._entries |= {name: (path, 8 + length, entry) for name, entry in header.items()}
        self._open: dict[Path, Any] = {}

    @classmethod
    def find(cls, pretrain: str, flag: str) -> "WeightFiles | None":
        """Of a folder or a hub name; None where the weights are in other files."""
        folder = Path(pretrain).expanduser()
        paths = safetensors_files(folder, flag) if folder.is_dir() else _fetched(pretrain, flag)
        return cls(paths) if paths else None

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][2]["shape"])

    def read(self, name: str, box: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a part of it: only that is read."""
        path = self._entries[name][0]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        file = self._open[path]
        return file.get_slice(name)[box] if box else file.get_tensor(name)

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are equal, of which no more than a few rows are held at a time."""
        if self.shape(first) != self.shape(second):
            return False
        rows, row_bytes = self.shape(first)[0], max(1, self._size(first) // max(1, self.shape(first)[0]))
        step = max(1, 2**24 // row_bytes)
        return all(
            self.read(first, (slice(row, row + step),)).equal(self.read(second, (slice(row, row + step),)))
            for row in range(0, rows, step)
        )

    def fingerprint(self) -> str:
        """Hash of names, types, shapes and a few bytes of every tensor, however they are divided into files."""
        digest = hashlib.blake2b(digest_size=16)
        descriptors = {path: os.open(path, os.O_RDONLY) for path in self.paths}
        try:
            for name in sorted(self._entries):
                path, start, entry = self._entries[name]
                digest.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
                begin, end = (start + offset for offset in entry["data_offsets"])
                for at in range(begin, end, max(WINDOW, (end - begin) // WINDOWS)):
                    digest.update(os.pread(descriptors[path], min(WINDOW, end - at), at))
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return f"{OF_FILES}{digest.hexdigest()}"

    def _size(self, name: str) -> int:
        begin, end = self._entries[name][2]["data_offsets"]
        return end - begin


def _fetched(name: str, flag: str) -> list[Path]:
    """The files of a model of the hub, in the local cache."""
    with hub_or_cache() as reachable:
        try:
            return _download(name, reachable)
        except Exception as error:  # a name that is not there, a closed model, a broken connection, an index cut off
            raise told(error, name, flag, reachable=reachable) from error


def _download(name: str, reachable: bool) -> list[Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(name, file, local_files_only=not reachable))

    with suppress(EntryNotFoundError):
        return [fetch(SINGLE)]
    try:
        index = json.loads(fetch(INDEX).read_text())
    except EntryNotFoundError:
        return []
    return [fetch(file) for file in sorted(set(index["weight_map"].values()))]
