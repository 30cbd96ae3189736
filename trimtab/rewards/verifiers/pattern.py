r"""Regular expression: 1 if it is found in the response, else 0. Without an argument the row's label is the pattern.

A search that takes longer than a second counts as not found: there are patterns, and answers, on which backtracking
would take for ever.
"""

import functools
from typing import Any

import regex

from trimtab.errors import UserError
from trimtab.rewards.types import BadSample

SECONDS = 1.0


def score(prompt: str, response: str, label: Any, pattern: str | None = None) -> float:
    try:
        return float(compiled(str(label) if pattern is None else pattern).search(response, timeout=SECONDS) is not None)
    except TimeoutError:
        return 0.0
    except regex.error as error:
        raise BadSample(f"the label {label!r} is not a regular expression ({error})") from error


def read_argument(text: str) -> str:
    try:
        compiled(text)
    except regex.error as error:
        raise UserError(f"regex({text}): not a regular expression ({error})") from error
    return text


@functools.lru_cache(4096)
def compiled(pattern: str) -> regex.Pattern:
    return regex.compile(pattern, regex.DOTALL)
