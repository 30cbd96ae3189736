"""Which folders are watched, and what is said of one that holds no run."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import UserError
from trimtab.report.read import MANIFEST, METRICS, OPTIONS

BEGUN = (METRICS, MANIFEST, OPTIONS)
"""Any of these in a folder: a run has begun there."""


def watched_folders(names: Sequence[str], *, wait: bool) -> list[Path]:
    """The folders of runs, each once; `wait`: a run may also begin later."""
    # What a shell makes of runs/* may hold files as well.
    chosen = [name for name in names if not Path(name).is_file()] or names
    folders = {os.path.realpath(name): Path(name) for name in chosen}
    for folder in folders.values():
        check(folder, wait=wait)
    return list(folders.values())


def check(folder: Path, *, wait: bool) -> None:
    try:
        if folder.is_file():
            raise UserError(f"{folder}: a file; give the --save_path of a run, which is a folder")
        if not folder.is_dir():
            if wait:
                return
            raise UserError(
                f"{folder}: no such folder; {_meant(folder)}give the --save_path of a run, or add --wait to "
                "wait for one that is about to begin"
            )
        names = set(os.listdir(folder))
        if METRICS in names:
            with (folder / METRICS).open("rb"):
                pass
        if wait or not names.isdisjoint(BEGUN):
            return
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read ({error.strerror}); see who may read it") from None
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    more = f"there are runs inside: {', '.join(inside[:5])}" if inside else "give the --save_path of a run"
    raise UserError(f"{folder}: no {METRICS} in this folder; {more}, or add --wait to wait for one to begin there")


def _meant(folder: Path) -> str:
    """A folder of almost this name that holds a run."""
    if not folder.parent.is_dir():
        return ""
    runs = [path.name for path in folder.parent.iterdir() if (path / METRICS).is_file()]
    close = difflib.get_close_matches(folder.name, runs, n=1)
    return f"did you mean {folder.parent / close[0]}? Or " if close else ""
