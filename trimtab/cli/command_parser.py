"""The parser of verbs with a few arguments of their own; those of jobs are trimtab.config's."""

from __future__ import annotations

import argparse
from typing import NoReturn

from trimtab.config.parser import take_negative_numbers
from trimtab.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """argparse, except that a mistake is a UserError of one line instead of a usage text."""

    def __init__(self, program: str, description: str):
        super().__init__(
            prog=program,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        take_negative_numbers(self)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")
