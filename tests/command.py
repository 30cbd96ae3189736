"""A command that runs in this process, and what it said."""

import shlex
from dataclasses import dataclass
from typing import Any

from trimtab.cli.main import main


@dataclass
class Outcome:
    verb: str
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What a command that succeeded printed."""
        assert self.code == 0, self.err
        return self.out

    @property
    def mistake(self) -> str:
        """The one line of a refused command."""
        begin = f"trimtab {self.verb}: error: "
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.err.startswith(begin) and self.err.count("\n") == 1, self.err
        return self.err.removeprefix(begin).strip()


def run(capsys: Any, text: str, *more: object) -> Outcome:
    """`text` is read as a shell reads it, `more` are single words."""
    capsys.readouterr()
    words = [*shlex.split(text), *map(str, more)]
    return Outcome(words[0], main(words), *capsys.readouterr())
