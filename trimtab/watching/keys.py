"""Single keys of a terminal, read without waiting for a line."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[Z": "back tab",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\t": "tab",
    b"\x1b": "escape",
}
REST = 0.05
"""Seconds that the rest of a key's bytes may take over a slow line."""


@contextmanager
def single_keys() -> Iterator[None]:
    """Inside, keys come at once and are not shown; Ctrl-C is still an interrupt."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_within(seconds: float) -> list[str]:
    """The keys that were pressed, as soon as there is one; empty when the time is over. The end of the input is "q"."""
    descriptor = sys.stdin.fileno()
    if not select.select([descriptor], [], [], max(0.0, seconds))[0]:
        return []
    pressed = os.read(descriptor, 1024)
    if not pressed:
        return ["q"]
    if pressed == b"\x1b" and select.select([descriptor], [], [], REST)[0]:
        pressed += os.read(descriptor, 1024)
    return keys_in(pressed)


def keys_in(pressed: bytes) -> list[str]:
    """The names of keys; unknown sequences are nothing."""
    found = []
    while pressed:
        known = next((code for code in SEQUENCES if pressed.startswith(code)), None)
        if known and (known != b"\x1b" or len(pressed) == 1):
            found.append(SEQUENCES[known])
            pressed = pressed[len(known) :]
        elif pressed[:1] == b"\x1b":
            # Up to the letter or ~ that ends a sequence.
            end = next((place for place, byte in enumerate(pressed[2:], 2) if 64 <= byte <= 126), len(pressed))
            pressed = pressed[end + 1 :]
        else:
            found += [pressed[:1].decode(errors="ignore")]
            pressed = pressed[1:]
    return found
