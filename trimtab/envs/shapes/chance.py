"""An episode's own share of the process's generators (random, and numpy's where it is loaded), for games that draw from
those: episodes of many threads take turns, so that company changes nothing and a game played again is the same."""

import random
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")
SEEDS = 2**31  # what every library's generator takes

_lock = threading.RLock()


class Chance:
    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    def seed(self, seed: int) -> None:
        self.of(_seed, seed % SEEDS)

    def of(self, function: Callable[..., R], *arguments: Any, **named: Any) -> R:
        """What the function gives, drawing where this episode's last call stopped. One call a process at a time."""
        with _lock:
            others = _read()
            if self._state is not None:
                _write(self._state)
            try:
                return function(*arguments, **named)
            finally:
                self._state = _read()
                _write(others)


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _read() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _write(state: tuple[Any, Any]) -> None:
    own, numpys = state
    random.setstate(own)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)
