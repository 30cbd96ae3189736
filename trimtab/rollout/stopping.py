"""Where an answer ends."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from trimtab.models.policy import Policy

Ids = TypeVar("Ids", list[int], np.ndarray)

_UNREADABLE = "\ufffd"
_UNSURE = 8  # characters at the beginning of a text decoded by itself


def stop_tokens(policy: Policy, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's end token and those the model's generation config names."""
    configured = getattr(policy.inner.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(t for t in [tokenizer.eos_token_id, *listed] if t is not None))


def stop_string_end(
    ids: Ids, looked: int, minimum: int, stops: Sequence[str], decode: Callable[[Ids], str]
) -> int | None:
    """How many tokens an answer has when its text first holds a stop string, and at least `minimum`; None: never yet.

    The first `looked` tokens have been looked at before, with nothing found. Only the end of the text is decoded: what
    is found there is looked for again in the whole, because a text's end may read otherwise by itself.
    """
    if len(ids) < minimum:
        return None
    # What stood among the first tokens, of which none could be the last, was not looked for.
    start = _tail(ids, looked, max(map(len, stops)), decode) if looked >= minimum else 0
    tail = decode(ids[start:])
    if not any(stop in tail for stop in stops):
        return None
    for end in range(max(looked + 1, minimum), len(ids) + 1):
        text = decode(ids[:end])
        if any(stop in text for stop in stops):
            return end
    return None


def _tail(ids: Ids, looked: int, characters: int, decode: Callable[[Ids], str]) -> int:
    """A token from which to decode, so that stop strings of so many characters are whole that end after `looked`.

    The first characters of such a text may differ from the whole one's: a space may be missing before its first word.
    Nor may it begin inside a character, whose other tokens would all be unreadable.
    """
    reach = characters + _UNSURE
    while reach < looked:
        start = looked - reach
        while start and _UNREADABLE in decode(ids[start : start + 1]):
            start -= 1
        if len(decode(ids[start:looked])) >= characters + _UNSURE:
            return start
        reach *= 2  # tokens without characters of their own
    return 0
