"""What can be said of models and data before any of them is read: of a place, and of a list of sources."""

import gzip
import os
from contextlib import suppress
from pathlib import Path

from trimtab.errors import UserError

DATA_SUFFIXES = {".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".py"}
FILE_TYPES = {"json", "csv", "parquet", "arrow", "text"}
SMALL_FILE = 4096


def check_place(place: str, flag: str) -> list[str]:
    """A local path must be there; a hub name passes, with a warning where it may be a mistyped path."""
    parent, name = os.path.split(os.path.expanduser(place))
    if os.path.exists(os.path.join(parent, name)):
        return []
    if looks_like_a_path(place):
        raise UserError(f"{flag}: {place} does not exist; check the path")
    if os.path.isdir(parent):
        return [f"{flag}: there is no {name} in the folder {parent}, so {place} is taken for a hub name"]
    return []


def looks_like_a_path(text: str) -> bool:
    """A hub name is `name` or `owner/name`, without a data file's suffix."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or os.path.splitext(text)[1].lower() in DATA_SUFFIXES


def listed(text: str | None) -> list[str]:
    """What a text that separates by commas lists."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def check_sources(text: str | None, flag: str) -> list[str]:
    """Refuse local sources that do not exist; return warnings about what may be a mistyped one."""
    warnings = []
    for source in listed(text):
        kind, at, folder = source.partition("@")
        if at and kind in FILE_TYPES:
            if not os.path.isdir(os.path.expanduser(folder)):
                raise UserError(f"{flag} {source}: there is no folder {folder}")
            continue
        if not at:
            warnings += check_place(source, flag)
        with suppress(OSError, EOFError):  # what cannot be read is explained where it is read
            refuse_empty(Path(source).expanduser())
    return warnings


def refuse_empty(path: Path) -> None:
    """A data file that holds nothing but white space (looked at only in small files), or a folder without files."""
    if path.is_dir() and not any(path.iterdir()):
        raise no_data_in(path)
    if not path.is_file():
        return
    size = path.stat().st_size
    if size and path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            empty = not file.read(SMALL_FILE).strip()
    else:
        empty = size < SMALL_FILE and not path.read_bytes().strip()
    if empty:
        raise UserError(f"{path} is empty: it holds no rows")


def no_data_in(folder: Path) -> UserError:
    return UserError(f"no data in {folder}: it holds no json, jsonl, csv, parquet or arrow file")


def check_mixture(sources: str, shares: str | None, flag: str) -> list[str]:
    """The same for sources that training cannot do without, with the share of each (`flag`_probs)."""
    names = listed(sources)
    if not names:
        raise UserError(f"{flag} {sources!r} names no source")
    if shares is not None:
        _check_shares(shares, len(names), flag)
    return check_sources(sources, flag)


def _check_shares(text: str, sources: int, flag: str) -> None:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{flag}_probs {text!r} must be numbers separated by commas, for example 0.7,0.3") from None
    if len(shares) != sources:
        raise UserError(f"{flag}_probs has {len(shares)} numbers for {sources} sources in {flag}")
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < float("inf"):
        raise UserError(f"{flag}_probs {text!r}: no share may be negative, and their sum must be above 0")
