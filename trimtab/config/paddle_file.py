"""What a file of PaddleNLP says, key by key: values of the right type, its defaults, and the line of every mistake."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trimtab.config.catalogue import find
from trimtab.config.groups import Origin
from trimtab.config.paddle_keys import KEYS, Key, found, options_named
from trimtab.config.values import plain
from trimtab.errors import UserError

Entry = tuple[int, str, Any]  # line, key, value


class PaddleFile:
    """The values of a file by key, with PaddleNLP's own where it has none; a mistake names file and line."""

    def __init__(self, job_class: type, path: str, entries: Sequence[Entry], on_the_line: Mapping[str, Any]):
        self.path, self.on_the_line = path, on_the_line
        self.lines: dict[str, int] = {}
        self._values: dict[str, Any] = {}
        for line, name, value in entries:
            where = f"{path} line {line}"
            key = found(name)
            if key is None:
                raise UserError(f"{where}: {_unknown(job_class, name)}")
            if name in self.lines:
                raise UserError(f"{where}: {name} is set twice in this file")
            self.lines[name] = line
            try:
                self._values[name] = _converted(key, value)
            except ValueError as error:
                raise UserError(f"{where}: {name} {error}") from None

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name)
        return _converted(KEYS[name], KEYS[name].absent) if value is None else value

    def says(self, name: str) -> bool:
        return self._values.get(name) is not None

    def now(self, name: str) -> Any:
        """The value after the command line, which wins."""
        return self.on_the_line.get(KEYS[name].option or "", self[name])

    def refuse(self, name: str, why: str) -> NoReturn:
        where = f"{self.path} line {self.lines[name]}" if name in self.lines else self.path
        value = self[name]
        shown = " ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else value
        raise UserError(f"{where}: {name} {'is missing' if value is None else shown}: {why}")

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where options come from that the command line does not have."""
        return tuple(
            (option, key.name, self.lines.get(key.name))
            for key in KEYS.values()
            for option in options_named(key)
            if option not in self.on_the_line
        )

    @property
    def method(self) -> str:
        return self["rl_algorithm"]

    @property
    def updates(self) -> int:
        """Optimiser steps that PaddleNLP makes of a rollout; what the command line has is not yet checked."""
        return max(1, math.ceil(self.now("global_batch_size") / self.prompts_at_once) * self.now("update_iters"))

    @property
    def prompts_at_once(self) -> int:
        mini = self["global_mini_batch_size"]
        return mini if mini > 0 else max(1, self.now("global_batch_size"))

    def iterations(self, name: str) -> int:
        """So many of PaddleNLP's steps, in rollouts."""
        return math.ceil(self[name] / self.updates)


def _converted(key: Key, value: Any) -> Any:
    """A value of the key's type; None where it says nothing, as an empty text does."""
    if value is None or value == "":
        return None
    if key.kind is list:
        words = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(words, list):
            raise ValueError(f"takes words, not {value!r}")
        return [str(word) for word in words]
    if key.kind is str and isinstance(value, bool):
        return "yes" if value else "no"  # YAML's own reading of a bare `no`
    return plain(key.kind, value)


def _unknown(job_class: type, name: str) -> str:
    close = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.7) or [key for key in KEYS if name in key][:1]
    if close:
        return f"unknown key {name} of PaddleNLP; did you mean {close[0]}?"
    if option := find(job_class, name):
        return f"{name} is an option of ours in a file of PaddleNLP: put {option.flag} on the command line"
    return f"unknown key {name} of PaddleNLP; docs/paddlenlp.md lists them"
