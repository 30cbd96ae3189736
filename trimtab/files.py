"""Files and folders that appear whole or not at all, and what is said where writing fails.

Whatever must not be found half-written goes through `replacing`: written beside its place, flushed to disk, renamed.
"""

import fcntl
import itertools
import json
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trimtab.errors import CannotWrite, UserError

UNFINISHED = ".writing-"
"""How everything begins that is still being written: a process that was killed may leave one behind."""

_numbers = itertools.count()


@contextmanager
def replacing(path: Path, *, within: Path | None = None) -> Iterator[Path]:
    """Where to write a file or a folder that takes the place of `path` if the block ends well, and is gone if not.

    `within`: a folder on the same disk to write it in, if not beside `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(within or path.parent) as beside:
        yield beside
        flush(beside)
        if beside.is_dir() and path.is_dir():
            shutil.rmtree(path)
        move(beside, path)


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A name in `folder` for a file or a folder to be written; what still has this name at the end is removed."""
    # Short, because what it will become may have a name as long as the system allows.
    path = folder / f"{UNFINISHED}{os.getpid()}-{next(_numbers)}"
    remove(path)
    try:
        yield path
    finally:
        remove(path)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as beside:
        beside.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any, *, indent: int = 2) -> None:
    write_text(path, json.dumps(content, indent=indent) + "\n")


def move(source: Path, place: Path) -> None:
    """Rename at once; a file that was at `place` is gone. The new name is on the disk when this returns."""
    os.replace(source, place)
    flush(place.parent, contents=False)


def remove(path: Path) -> None:
    """A file, or a folder and what is in it; or nothing, if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def flush(path: Path, *, contents: bool = True) -> None:
    """What was written to a file or folder (and `contents`: to everything in it) is on the disk when this returns."""
    for inside in path.iterdir() if contents and path.is_dir() else ():
        flush(inside)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- folders that a run is at work in

MARK, LOCK = "unfinished", ".lock"
FLOCK = {"linux": ("hhqqi4x", 0), "darwin": ("qqihh", 3)}
"""How the system's record of a lock is laid out, and where in it the kind of lock is."""

_locked_here: list[str] = []


def mark_unfinished(folder: Path) -> None:
    """Say that the model in a folder is not whole, or not what the rest of the folder tells of."""
    write_text(
        folder / MARK, "A run has not finished here: what looks like its model is an earlier one, or not whole.\n"
    )


def mark_finished(folder: Path) -> None:
    (folder / MARK).unlink(missing_ok=True)


def is_unfinished(folder: Path) -> bool:
    return (folder / MARK).exists()


@contextmanager
def locked(flag: str, folder: Path) -> Iterator[None]:
    """Inside, no other process may enter for the same folder. The end of this process, however it comes, unlocks it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file, _remembered(folder):
        try:
            # Not flock: a child that outlives a killed parent would inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise _in_use(flag, folder) from error
        except OSError as error:
            print(f"warning: {folder}: no lock can be had here ({reason(error)}), so start no second run there")
        with suppress(OSError):  # a full disk: the lock holds all the same
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def check_free(flag: str, folder: Path) -> None:
    """Refuse a folder that another process has locked. Who gets the lock is decided in `locked`."""
    if is_locked(folder):
        raise _in_use(flag, folder)


def _in_use(flag: str, folder: Path) -> UserError:
    with (folder / LOCK).open(errors="replace") as file:
        holder = file.read(200).strip() or "it does not say which"
    return UserError(f"--{flag} {folder}: another run is at work there ({holder}); wait for it or give another folder")


@contextmanager
def _remembered(folder: Path) -> Iterator[None]:
    """A process is not told of its own locks, and would lose one by opening and closing the file."""
    _locked_here.append(os.path.realpath(folder))
    try:
        yield
    finally:
        _locked_here.remove(os.path.realpath(folder))


def is_locked(folder: Path) -> bool | None:
    """Whether a process is inside `locked` for this folder; None: that cannot be known. The lock is asked for, never
    taken, so that nobody who wants it is turned away."""
    if os.path.realpath(folder) in _locked_here:
        return True
    if sys.platform not in FLOCK:
        return None
    try:
        with (folder / LOCK).open("rb") as file:
            layout, place = FLOCK[sys.platform]
            question = [0] * 5
            question[place] = fcntl.F_WRLCK
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, *question))
            if struct.unpack(layout, answer)[place] != fcntl.F_UNLCK:
                return True
            host = file.read(200).decode(errors="replace").rpartition(" on ")[2]
    except FileNotFoundError:
        return False
    except OSError:
        return None
    # What another machine holds is not told on every disk that machines share.
    return False if host in ("", socket.gethostname()) else None


def remove_leftovers(folder: Path) -> None:
    """What killed processes were writing in a folder; to be called by the one that has it locked."""
    for path in folder.glob(f"{UNFINISHED}*"):
        remove(path)


def new_temporary_folder(name: str) -> Path:
    """A folder of our own among the system's temporary ones, to stay."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


# ---- where writing fails


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise UserError(f"--{flag} {folder}: {nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"--{flag} {folder}: you may not write in {nearest}; choose another folder")


@contextmanager
def writing(what: str, advice: str = "") -> Iterator[None]:
    """A full or vanished disk inside becomes one line that begins with `what`, and ends with what to do about it."""
    try:
        yield
    except Exception as error:
        # Known by its name: `trimtab VERB --help` imports this module and no library.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise CannotWrite(f"{what} ({reason(error)}){advice and f'; {advice}'}") from error


def reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
