"""What can be said of models and data before any of them is read: of a place, and of a list of sources."""

import os

from trimtab.errors import UserError

DATA_SUFFIXES = {".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".py"}
FILE_TYPES = {"json", "csv", "parquet", "arrow", "text"}


def place_exists(place: str, flag: str) -> None:
    """A hub name passes; a local path must be there."""
    if looks_like_a_path(place) and not os.path.exists(os.path.expanduser(place)):
        raise UserError(f"{flag}: {place} does not exist; check the path")


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
        parent, name = os.path.split(os.path.expanduser(source))
        if at or os.path.exists(os.path.join(parent, name)):
            continue
        if looks_like_a_path(source):
            raise UserError(f"{flag}: {source} does not exist; check the path")
        if os.path.isdir(parent):
            warnings.append(f"{flag}: there is no {name} in the folder {parent}, so {source} is taken for a hub name")
    return warnings


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
