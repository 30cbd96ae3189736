"""Writing to disk, where failure is an everyday thing: told in one line, and where possible before training."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trimtab.errors import UserError


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise UserError(f"--{flag} {folder}: {nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"--{flag} {folder}: you may not write in {nearest}; choose another folder")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A full or vanished disk inside becomes one line that begins with `what`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{what} ({reason(error)})") from error


def flush(path: Path) -> None:
    """What was written to a file or folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
