"""A pretrained model's files, in a folder or on the hub: check, load and fingerprint them.

Every mistake becomes one line that names the option. There are two kinds of fingerprints: of safetensors files (with
the prefix `files-`), and of parameters in memory if there are no such files. They are not comparable with each other.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trimtab.data.hub import check_looks_like_model, first_line, hub_or_cache, needs_code, read_json, trust_remote_code
from trimtab.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILES_PREFIX = "files-"
WINDOWS, WINDOW = 16, 4096  # hashed pieces of each tensor in a file, and their size in bytes
SAMPLE = 65_536  # hashed elements of each tensor in memory: enough to distinguish models, and fast

Found = dict[str, set]
"""Problems found by loading, in Hugging Face's format: missing_keys, and mismatched_keys (name, found and needed
shape)."""


def nothing_found() -> Found:
    return {"missing_keys": set(), "mismatched_keys": set()}


def from_pretrained(loader: Any, pretrain: str, *, flag: str = "--pretrain", **arguments: Any) -> Any:
    """Load with one of Hugging Face's auto classes, from a folder or the hub; errors become UserError."""
    arguments["trust_remote_code"] = trust_remote_code()
    reachable = True
    try:
        if Path(pretrain).expanduser().is_dir():
            return loader.from_pretrained(os.path.expanduser(pretrain), **arguments)
        with hub_or_cache() as reachable:
            return loader.from_pretrained(pretrain, local_files_only=not reachable, **arguments)
    except Exception as error:  # broken files may raise anything
        raise load_error(error, pretrain, flag, reachable=reachable) from error


def fake_model(
    pretrain: str, loader: Any, flag: str = "--pretrain", *, building: dict[str, Any] | None = None, **arguments: Any
) -> nn.Module:
    """The model on the meta device, without weights. `building`: further arguments of its class."""
    from transformers import AutoConfig

    config = from_pretrained(AutoConfig, pretrain, flag=flag, **arguments)
    try:
        with torch.device("meta"):
            return loader.from_config(config, trust_remote_code=trust_remote_code(), **building or {})
    except (OSError, ValueError, ImportError) as error:
        raise load_error(error, pretrain, flag) from error


def load_error(error: Exception, pretrain: str, flag: str, *, reachable: bool = True) -> UserError:
    """A one-line error for a model that could not be read or fetched. `reachable`: whether the hub could be reached."""
    if (why := needs_code(error)) is not None:
        return UserError(f"{flag} {pretrain}: {why}")
    if reachable:
        return UserError(f"{flag} {pretrain}: {first_line(error)}")
    return UserError(
        f"{flag} {pretrain}: no such local folder, not in the local cache, and the hub cannot be reached "
        "(check the name, or the network and HF_HUB_OFFLINE)"
    )


def refuse_fresh_weights(pretrain: str, found: Found, *, flag: str = "--pretrain") -> None:
    """Refuse files that lack weights: transformers would silently initialize them at random."""
    if wrong := sorted(found["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise UserError(
            f"{flag} {pretrain}: {len(wrong)} weights do not fit config.json: {name} has shape "
            f"{list(stored)}, {list(expected)} is needed"
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{flag} {pretrain}: {len(missing)} weights of this model are not in its files, such as {missing[0]}; "
            "is it a causal LM, completely copied?"
        )


def quiet_transformers() -> None:
    """Silence progress bars and warnings of transformers; we report what matters to users ourselves."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_model_folder(pretrain: str, flag: str = "--pretrain") -> None:
    """Check a local model folder for common mistakes, so that they become one-line errors."""
    if not check_looks_like_model(pretrain, flag):
        return
    folder = Path(pretrain).expanduser()
    read_json(folder / "config.json", flag)
    for path in _local_files(folder, flag):
        try:
            with safe_open(path, framework="pt"):
                pass  # reading the header detects truncated files
        except (OSError, SafetensorError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else first_line(error)
            raise UserError(f"{flag} {path}: damaged or missing weights ({reason}); copy the file again") from error


RANDOM = "random_weights"  # in the metadata of a file without tensors


def has_random_weights(pretrain: str) -> bool:
    path = Path(pretrain).expanduser() / SINGLE
    return path.is_file() and WeightFiles([path]).random


class WeightFiles:
    """The safetensors files of a model: names and shapes of tensors, and reads of any part of a tensor."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        self.random = False  # a model given by its size: weights are drawn where they are needed
        for path in paths:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            self.random |= RANDOM in header.pop("__metadata__", {})
            self._entries |= {name: (path, 8 + length, entry) for name, entry in header.items()}
        self._open: dict[Path, Any] = {}

    @classmethod
    def find(cls, pretrain: str, flag: str) -> "WeightFiles | None":
        """The files of a folder or a hub name; None if the weights are in other formats."""
        folder = Path(pretrain).expanduser()
        paths = _local_files(folder, flag) if folder.is_dir() else _fetched_files(pretrain, flag)
        return cls(paths) if paths else None

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][2]["shape"])

    def read(self, name: str, box: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or only the part `box` of it."""
        path = self._entries[name][0]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        file = self._open[path]
        return file.get_slice(name)[box] if box else file.get_tensor(name)

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are equal, read a few rows at a time."""
        if self.shape(first) != self.shape(second):
            return False
        rows, (begin, end) = self.shape(first)[0], self._entries[first][2]["data_offsets"]
        step = max(1, 2**24 * rows // max(1, end - begin))
        return all(
            self.read(first, (slice(row, row + step),)).equal(self.read(second, (slice(row, row + step),)))
            for row in range(0, rows, step)
        )

    def fingerprint(self) -> str:
        """Hash of names, dtypes, shapes and some bytes of every tensor, independent of how they are divided into
        files."""
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
        return f"{FILES_PREFIX}{digest.hexdigest()}"


def weights_fingerprint(model: nn.Module) -> str:
    """Hash of names, shapes and evenly sampled values of parameters in memory."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        stride = max(1, flat.numel() // SAMPLE)
        values = flat[::stride][:SAMPLE].float().cpu().contiguous()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _local_files(folder: Path, flag: str) -> list[Path]:
    """The safetensors files of a folder; empty if the weights are in other formats."""
    index, single = folder / INDEX, folder / SINGLE
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    return [folder / name for name in sorted(set(read_json(index, flag).get("weight_map", {}).values()))]


def _fetched_files(name: str, flag: str) -> list[Path]:
    """The safetensors files of a model on the hub, in the local cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(name, file, local_files_only=not reachable))

    with hub_or_cache() as reachable:
        try:
            with suppress(EntryNotFoundError):
                return [fetch(SINGLE)]
            names: set[str] = set()
            with suppress(EntryNotFoundError):
                names = set(json.loads(fetch(INDEX).read_text())["weight_map"].values())
            return [fetch(file) for file in sorted(names)]
        except Exception as error:  # an unknown name, a gated model, a broken connection, a truncated index
            raise load_error(error, name, flag, reachable=reachable) from error
