"""The fields of a request's body, each of the right type and within its bounds, or a refusal that names it."""

import math
from typing import Any

from trimtab.serving.refusals import NotUnderstood

LARGEST = 2**63


class Fields:
    """Of a JSON object. A field that is null is one that is not there."""

    def __init__(self, body: dict[str, Any], within: str = "", size: int = 0):
        """`within`: what a field's name is put behind in a refusal; `size`: of all that came, in bytes."""
        self.body, self.within, self.size = body, within, size

    def __contains__(self, name: str) -> bool:
        return self.body.get(name) is not None

    def wrong(self, name: str, needed: str) -> NotUnderstood:
        return NotUnderstood(f"{self.within}{name} must be {needed}", self.within + name)

    def part(self, name: str) -> "Fields":
        found = self.body.get(name)
        if found is not None and not isinstance(found, dict):
            raise self.wrong(name, "an object")
        return Fields(found or {}, f"{self.within}{name}.")

    def whole(self, name: str, default: int, least: int, most: int = LARGEST - 1) -> int:
        found = self.optional_whole(name, least, most)
        return default if found is None else found

    def optional_whole(self, name: str, least: int, most: int = LARGEST - 1) -> int | None:
        found = self.body.get(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            bounds = f"at least {least}" if most == LARGEST - 1 else f"between {least} and {most}"
            raise self.wrong(name, f"a whole number, {bounds}")
        return found

    def number(self, name: str, default: float, least: float, most: float = math.inf) -> float:
        found = self.body.get(name)
        if found is None:
            return default
        numeric = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < LARGEST
        if not numeric or not least <= found <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            raise self.wrong(name, f"a number, {bounds}")
        return float(found)

    def flag(self, name: str, default: bool = False) -> bool:
        found = self.body.get(name)
        if found is not None and not isinstance(found, bool):
            raise self.wrong(name, "true or false")
        return default if found is None else found

    def text(self, name: str) -> str | None:
        found = self.body.get(name)
        if found is not None and not is_text(found):
            raise self.wrong(name, "a text")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """One text, or a list of them."""
        found = self.body.get(name)
        listed = [] if found is None else found if isinstance(found, list) else [found]
        if not all(is_text(text) and text for text in listed):
            raise self.wrong(name, "a text that is not empty, or a list of such texts")
        return tuple(listed)

    def ids(self, name: str) -> list[int]:
        found = self.body.get(name)
        if not isinstance(found, list) or not are_ids(found):
            raise self.wrong(name, "a list of token ids")
        return found


def is_text(value: Any) -> bool:
    """JSON may hold halves of characters, which no tokenizer reads."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}
