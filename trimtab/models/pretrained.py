"""Reading a Hugging Face folder or hub name, with every mistake told in one line that names the option."""

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

from trimtab.data.hub import hub_or_cache, needs_code, trust_remote_code
from trimtab.errors import UserError
from trimtab.models.folder import check_looks_like_model, first_line, read_json


def from_pretrained(loader: Any, pretrain: str, *, flag: str = "--pretrain", **arguments: Any) -> Any:
    """What one of Hugging Face's auto classes loads from a folder or the hub; a failure is told in one line."""
    arguments["trust_remote_code"] = trust_remote_code()
    reachable = True
    try:
        if Path(pretrain).expanduser().is_dir():
            return loader.from_pretrained(os.path.expanduser(pretrain), **arguments)
        with hub_or_cache() as reachable:
            return loader.from_pretrained(pretrain, local_files_only=not reachable, **arguments)
    except Exception as error:  # broken files raise whatever the library that reads them likes
        raise load_error(error, pretrain, flag, reachable=reachable) from error


def load_error(error: Exception, pretrain: str, flag: str, *, reachable: bool) -> UserError:
    """In one line, why a model could not be read or fetched. `reachable`: the hub is, where it was asked."""
    if (why := needs_code(error)) is not None:
        return UserError(f"{flag} {pretrain}: {why}")
    if reachable:
        return UserError(f"{flag} {pretrain}: {first_line(error)}")
    return UserError(
        f"{flag} {pretrain}: no such local folder, not in the local cache, and the hub cannot be reached "
        "(check the name, or the network and HF_HUB_OFFLINE)"
    )


def refuse_fresh_weights(pretrain: str, found: dict, *, flag: str = "--pretrain") -> None:
    """The library would draw missing weights at random, without a word."""
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
    """Its bars and warnings belong to its own users; what matters to ours is said by us."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def fake_model(
    pretrain: str, loader: Any, flag: str = "--pretrain", *, building: dict[str, Any] | None = None, **arguments: Any
) -> nn.Module:
    """The model's modules without its weights. `building`: what else its class is told, beside its configuration."""
    from transformers import AutoConfig

    config = from_pretrained(AutoConfig, pretrain, flag=flag, **arguments)
    try:
        with torch.device("meta"):
            return loader.from_config(config, trust_remote_code=trust_remote_code(), **building or {})
    except (OSError, ValueError, ImportError) as error:
        if (why := needs_code(error)) is not None:
            raise UserError(f"{flag} {pretrain}: {why}") from error
        raise UserError(f"{flag} {pretrain}: {first_line(error)}") from error


def check_model_folder(pretrain: str, flag: str = "--pretrain") -> None:
    """Catch the common mistakes with a local folder before a library explains them at length."""
    if not check_looks_like_model(pretrain, flag):
        return
    folder = Path(pretrain).expanduser()
    read_json(folder / "config.json", flag)
    for path in safetensors_files(folder, flag):
        try:
            with safe_open(path, framework="pt"):
                pass  # reads the header, which tells whether the file is whole
        except (OSError, SafetensorError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else first_line(error)
            raise UserError(f"{flag} {path}: damaged or missing weights ({reason}); copy the file again") from error


def safetensors_files(folder: Path, flag: str) -> list[Path]:
    """Those that hold a model's weights, in a folder of it; none where they are in other files."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    return [folder / name for name in sorted(set(read_json(index, flag).get("weight_map", {}).values()))]


# ---- Tell models apart by their weights: by those in their safetensors files, or in memory where there are none. The
# first begins with the word `files`, so that what was noted in one way is not compared with the other.


OF_FILES = "files-"
SAMPLE = 65_536  # elements hashed of each tensor: enough to tell models apart, little enough to be instant


def same_kind(first: str | None, second: str | None) -> bool:
    """Whether two fingerprints tell something of each other."""
    return (first or "").startswith(OF_FILES) == (second or "").startswith(OF_FILES)


def weights_fingerprint(model: nn.Module) -> str:
    """Hash of names, shapes and an even sample of the values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        stride = max(1, flat.numel() // SAMPLE)
        values = flat[::stride][:SAMPLE].float().cpu().contiguous()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


# ---- The safetensors files of a model: what is in them, without reading it, and any part of it.


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
            raise load_error(error, name, flag, reachable=reachable) from error


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
