"""Runs in a terminal."""

from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import UserError


def watch_in_terminal(folders: Sequence[Path], *, every: float, once: bool) -> None:
    raise UserError("not there yet")
