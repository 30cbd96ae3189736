"""Why a data file could not be read, in one line: the dataset library says that it failed, this says where."""

import gzip
import json
from pathlib import Path
from typing import TextIO

from trimtab.errors import error_chain

FAULTS_SHOWN = 200  # characters of a foreign message


def first_line(error: BaseException) -> str:
    """The most telling line of an exception and its causes, short enough for one line of output."""
    error = list(error_chain(error, contexts=False))[-1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= FAULTS_SHOWN else text[: FAULTS_SHOWN - 3] + "..."


def open_text(path: Path, newline: str | None = None) -> TextIO:
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", newline=newline)


def read_text(path: Path) -> str:
    with open_text(path) as file:
        return file.read()


def json_fault(path: Path) -> str | None:
    """Where a JSON or JSON-lines file goes wrong ("file, line 3: ..."), or None if every line is an object."""
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        return f"{path} is not UTF-8 text (byte {error.start})"
    except (OSError, EOFError) as error:
        return f"{path} cannot be read: {first_line(error)}"
    if text.lstrip().startswith("["):
        return _array_fault(path, text)
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == 1 and _is_one_object(text):
                return None
            return f"{path}, line {number}: malformed JSON ({error.msg}, column {error.colno})"
        if not isinstance(value, dict):
            return f"{path}, line {number}: {_kind(value)} where an object like {{...}} is needed"
    return None


def _array_fault(path: Path, text: str) -> str | None:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        return f"{path}, line {error.lineno}: malformed JSON ({error.msg}, column {error.colno})"
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            return f"{path}, item {number}: {_kind(value)} where an object like {{...}} is needed"
    return None


def _is_one_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)
