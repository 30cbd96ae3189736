"""A file of rows that another process writes: what is new in it since the last look, and nothing read twice.

A last line that is not whole yet waits for its end. A resumed run takes rows back and writes the file anew, and a new
run puts another in its place: then everything is read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trimtab.report.read import parsed

AT_ONCE = 1 << 20
REMEMBERED = 256
"""Bytes before the place reached that must still be the same, for the rest to be what follows them."""


class FollowedLines:
    def __init__(self, path: Path, key: str = "step"):
        """`key`: what a row calls its step."""
        self.path, self.key = path, key
        self.unreadable = 0
        """How many whole lines were no row."""
        self.written: float | None = None
        """When the file was last written to; None: it is not there."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._file_number: tuple[int, int] | None = None
        self._place, self._before, self._half = 0, b"", b""
        self.unreadable = 0

    def news(self) -> tuple[bool, Iterator[dict[str, Any]]]:
        """Whether all earlier rows are void, and the rows to add. They are read as they are asked for; take all."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            void = self._place > 0
            self.written = None
            self._begin_anew()
            return void, iter(())
        except OSError:
            return False, iter(())  # a disk that is away for a moment; a folder that may not be read was refused before
        status = os.fstat(file.fileno())
        number = status.st_dev, status.st_ino
        self.written = status.st_mtime
        void = self._place > 0 and not (number == self._file_number and self._continues(file, status.st_size))
        if void:
            self._begin_anew()
        self._file_number = number
        return void, self._rows(file, status.st_size)

    def _continues(self, file: BinaryIO, size: int) -> bool:
        if size < self._place:
            return False
        if size == self._place:
            return True
        file.seek(self._place - len(self._before))
        return file.read(len(self._before)) == self._before

    def _rows(self, file: BinaryIO, size: int) -> Iterator[dict[str, Any]]:
        with file:
            file.seek(self._place)
            while self._place < size and (block := file.read(min(AT_ONCE, size - self._place))):
                self._place += len(block)
                self._before = (self._before + block)[-REMEMBERED:]
                *lines, self._half = (self._half + block).split(b"\n")
                for line in lines:
                    row = parsed(line.decode(errors="replace"), self.key)
                    if row is not None:
                        yield row
                    elif line.strip():
                        self.unreadable += 1
