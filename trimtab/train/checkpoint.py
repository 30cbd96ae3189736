"""Resumable checkpoints that are whole or absent.

    ckpt_path/
      latest                     the name of the newest whole checkpoint
      global_step40/             tensors.safetensors (weights, Adam's moments, random state), state.json
      global_step40_hf/          with --save_hf_ckpt: the model as a Hugging Face folder

A checkpoint is written beside its place, flushed to disk, renamed, and only then does `latest` move. Nothing here is
a pickle, so a checkpoint from a stranger runs no code.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.errors import UserError
from trimtab.train.disk import reason

PREFIX = "global_step"
TENSORS, STATE, LATEST = "tensors.safetensors", "state.json", "latest"


class Checkpoints:
    def __init__(self, folder: Path, *, keep: int, keep_gib: float):
        self.folder = folder
        self.keep = max(1, keep)
        self.keep_bytes = keep_gib * 2**30

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict, export: Callable[[Path], None] | None = None
    ) -> Path:
        """Write the checkpoint of `step`; `export` writes the Hugging Face folder beside it."""
        final = self.folder / f"{PREFIX}{step}"
        beside = self.folder / f".writing-{PREFIX}{step}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clean()
            beside.mkdir()
            save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, beside / TENSORS)
            (beside / STATE).write_text(json.dumps(state))
            for name in (TENSORS, STATE):
                _flush(beside / name)
            _flush(beside)
            if final.exists():  # an earlier run's checkpoint of the same step
                final.rename(self.folder / f".old-{PREFIX}{step}-{os.getpid()}")
            beside.rename(final)
            _flush(self.folder)
            if export is not None:
                export(self.folder / f"{PREFIX}{step}_hf")
            self._point_at(final.name)
            self._prune(final)
            self.clean()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            previous = self.latest()
            kept = f"the previous one ({previous.name}) is intact" if previous else "there is no earlier one"
            raise UserError(
                f"--ckpt_path {self.folder}: cannot write the checkpoint of step {step} ({reason(error)}); {kept}; "
                "free some space and continue with --load_checkpoint"
            ) from error
        return final

    def latest(self) -> Path | None:
        """The newest whole checkpoint, whatever an interrupted write left behind."""
        with suppress(OSError):
            named = self.folder / (self.folder / LATEST).read_text().strip()
            if (named / STATE).exists():
                return named
        whole = [p for p in self._all() if (p / STATE).exists()]
        return whole[-1] if whole else None

    def load(self) -> tuple[dict[str, Tensor], dict] | None:
        path = self.latest()
        if path is None:
            return None
        try:
            return load_file(path / TENSORS), json.loads((path / STATE).read_text())
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(
                f"--ckpt_path {path}: damaged checkpoint ({reason(error)}); remove this folder to use the one before"
            ) from error

    def clean(self) -> None:
        """Remove what interrupted writes left. A replaced checkpoint counts as garbage once its successor is there."""
        for pattern in (".writing-*", ".old-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[Path]:
        paths = [p for p in self.folder.glob(f"{PREFIX}*") if p.name[len(PREFIX) :].isdigit()]
        return sorted(paths, key=lambda p: int(p.name[len(PREFIX) :]))

    def _point_at(self, name: str) -> None:
        beside = self.folder / f".{LATEST}-{os.getpid()}"
        beside.write_text(name)
        _flush(beside)
        os.replace(beside, self.folder / LATEST)

    def _prune(self, newest: Path) -> None:
        """Oldest first, until both limits hold; the newest stays whatever they say."""
        kept = [p for p in self._all() if p != newest] + [newest]
        sizes = {p: _size(p) for p in kept}
        while len(kept) > 1 and (len(kept) > self.keep or sum(sizes[p] for p in kept) > self.keep_bytes):
            oldest = kept.pop(0)
            shutil.rmtree(oldest, ignore_errors=True)
            shutil.rmtree(oldest.with_name(oldest.name + "_hf"), ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    both = (folder, folder.with_name(folder.name + "_hf"))
    return sum(p.stat().st_size for f in both for p in f.rglob("*") if p.is_file())
