"""Numbers, names and times as a person would write them, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

MOST_ITEMS = 4


def short_number(value: float) -> str:
    """Few characters for an axis or a headline: 1500 -> 1,500, 25300 -> 25.3k, 0.00002 -> 2e-5."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, divisor, suffix in ((1e15, 0, ""), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{suffix}" if divisor else f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-3:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def percent(share: float, digits: int = 1) -> str:
    """0.8533 -> 85.3 %; whole percents without a decimal, and 100 % only for all of them."""
    text = f"{100 * share:.{digits}f}"
    if float(text) == 100 and share < 1:
        text = f"{100 - 10**-digits:.{digits}f}"
    # A space that does not break: the sign stays with its number.
    return f"{text.removesuffix('.' + '0' * digits)}\u00a0%"


def plain(value: Any) -> str:
    """Any value from a file."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        more = f" and {len(value) - MOST_ITEMS} more" if len(value) > MOST_ITEMS else ""
        return ", ".join(map(plain, value[:MOST_ITEMS])) + more
    return str(value)


def count(value: Any) -> str:
    return f"{value:,}" if type(value) is int else plain(value)


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def spans(numbers: Sequence[int]) -> str:
    """Ascending whole numbers in words: 1, 2, 3, 7 -> 1 to 3 and 7."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    told = [f"{s[0]} to {s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in stretches]
    if len(told) > MOST_ITEMS + 1:
        told = [*told[:MOST_ITEMS], f"{sum(map(len, stretches[MOST_ITEMS:]))} more"]
    return " and ".join(filter(None, [", ".join(told[:-1]), told[-1]]))


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """A curve in one line of text: 0.1, 0.4, 0.9 between 0 and 1 -> ▁▄█."""
    blocks = "▁▂▃▄▅▆▇█"
    scale = len(blocks) / (high - low)
    return "".join(blocks[min(len(blocks) - 1, max(0, int((value - low) * scale)))] for value in values)


def short_name(path: Any, otherwise: str) -> str:
    """The end of a path or hub name: enough to recognise it, short enough for a headline."""
    parts = [part for part in str(path or "").strip().replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-2:]) or otherwise


class Html(str):
    """A cell that is HTML already."""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "data sides", card: str = "card scroll"
) -> str:
    """A table of text in a card; `kind` and `card` are classes of the page's style."""

    def line(cells: Sequence[str], tag: str) -> str:
        texts = (cell if isinstance(cell, Html) else escape(cell) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    return f'<div class="{card}"><table class="{kind}">{line(head, "th")}{body}</table></div>'
