"""What can be said of a list of data sources before any of them is read."""

import os

from trimtab.config.bounds import looks_like_a_path
from trimtab.errors import UserError

FILE_TYPES = {"json", "csv", "parquet", "arrow", "text"}


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
