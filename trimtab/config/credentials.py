"""Credentials in addresses (`http://user:password@host/path?token=...`): used, but shown and written nowhere."""

import re

_USER = re.compile(r"(?<=//)[^/?#\s]*@")
_NAMES = re.compile(r"key|token|secret|pass|pwd|auth|sig|cred|session|jwt|bearer", re.IGNORECASE)
_LONG = 20  # a value of so many characters may be a key, whatever it is called


def without_credentials(address: str) -> str:
    """The address as it may be shown: where it is, and what it is asked, but not by whom."""
    place, question, query = _USER.sub("", address).partition("?")
    kept = [part for part in query.split("&") if part and not _is_credential(part)]
    return place + (question + "&".join(kept) if kept else "")


def credentials(address: str) -> set[str]:
    """What must not be shown of it."""
    users = {user[:-1] for user in _USER.findall(address)}
    words = users | {user.partition(":")[2] for user in users}
    return words | {part.partition("=")[2] for part in address.partition("?")[2].split("&") if _is_credential(part)}


def _is_credential(part: str) -> bool:
    name, _, value = part.partition("=")
    return bool(_NAMES.search(name)) or len(value) >= _LONG
