"""Length: 1 while the response has at least LOW and at most HIGH characters.

Beyond, it falls to 0 at half of LOW and at twice HIGH. Written length(HIGH) or length(LOW-HIGH).
"""

from typing import Any

from trimtab.errors import UserError


def score(prompt: str, response: str, label: Any, bounds: tuple[int, int]) -> float:
    low, high = bounds
    size = len(response)
    if size > high:
        return max(0.0, 2 - size / high)
    return 1.0 if size >= low else max(0.0, 2 * size / low - 1)


def read_argument(text: str) -> tuple[int, int]:
    low, dash, high = text.rpartition("-")
    try:
        bounds = int(low) if dash else 0, int(high)
    except ValueError:
        bounds = (1, 0)
    if not 0 <= bounds[0] <= bounds[1] or bounds[1] < 1:
        raise UserError(f"length({text}): give characters as HIGH or LOW-HIGH, for example length(20-400)")
    return bounds
