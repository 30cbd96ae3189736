"""The small questions that checks ask of one option, and the one line that answers a wrong value."""

import dataclasses
import os
from typing import Any

from trimtab.errors import UserError

DATA_SUFFIXES = {".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".py"}


def changed(options: Any, name: str) -> bool:
    """Whether the job has this option and it is not at its default."""
    default = next((known.default for known in dataclasses.fields(options) if known.name == name), None)
    return getattr(options, name, default) != default


def at_least(options: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(options, name) < least:
            raise UserError(f"--{name} is {getattr(options, name):g}: it must be at least {least}")


def above_zero(options: Any, *names: str) -> None:
    for name in names:
        if getattr(options, name) <= 0:
            raise UserError(f"--{name} is {getattr(options, name):g}: it must be above 0")


def between_zero_and_one(options: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(options, name) <= 1:
            raise UserError(f"--{name} is {getattr(options, name):g}: it must be between 0 and 1")


def every_so_often(options: Any, name: str) -> None:
    value = getattr(options, name)
    if value < 1 and value != -1:
        raise UserError(f"--{name} is {value}: it must be a number of steps above 0, or -1")


def one_of(options: Any, name: str, *choices: str) -> None:
    value = getattr(options, name)
    if value not in choices:
        raise UserError(f"--{name} is {value}: it must be {', '.join(choices[:-1])} or {choices[-1]}")


def a_place_that_exists(options: Any, name: str) -> None:
    """A hub name passes; a local path must be there."""
    if place := getattr(options, name):
        place_exists(place, f"--{name}")


def place_exists(place: str, flag: str) -> None:
    if looks_like_a_path(place) and not os.path.exists(os.path.expanduser(place)):
        raise UserError(f"{flag}: {place} does not exist; check the path")


def looks_like_a_path(text: str) -> bool:
    """A hub name is `name` or `owner/name`, without a data file's suffix."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or os.path.splitext(text)[1].lower() in DATA_SUFFIXES
