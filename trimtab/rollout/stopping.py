"""Where an answer ends."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.rollout.types import Sampling

Ids = TypeVar("Ids", list[int], np.ndarray)

_UNREADABLE = "\ufffd"
_UNSURE = 8  # characters at the beginning of a text decoded by itself


def stop_tokens(policy: Policy, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's end token, if there is one, and those the model's generation config
    names."""
    configured = getattr(policy.inner.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys(t for t in [own, *listed] if t is not None))


def check_setting(sampling: Sampling, vocabulary: int, tokenizer: Any) -> None:
    """Of a request, which may be a stranger's: that it names tokens of the model alone, and can be followed."""
    if sampling.stop_strings and tokenizer is None:
        raise UserError("stop strings need a tokenizer; give the engine one")
    for name, tokens in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("forbidden_tokens", sampling.forbidden_tokens),
    ):
        if (strange := next((token for token in tokens if not 0 <= token < vocabulary), None)) is not None:
            raise UserError(f"sampling: {name} has token {strange}, and the model's vocabulary is {vocabulary}")
    if vocabulary == len(set(sampling.forbidden_tokens)):
        raise UserError("sampling: forbidden_tokens are all that the model has; leave it one")


def at_stop_tokens(tokens_BS: np.ndarray, stops: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Where rows of tokens have one of their own stop tokens."""
    if len(set(stops)) == 1:
        return np.isin(tokens_BS, stops[0])
    found = np.zeros(tokens_BS.shape, dtype=bool)
    for own in set(stops):
        rows = [row for row, others in enumerate(stops) if others == own]
        found[rows] = np.isin(tokens_BS[rows], own)
    return found


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
