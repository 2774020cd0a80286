"""What is appended to a file of JSON lines, row by row, from any place in it: for whoever follows a run's files.

A line counts once its end is there. Knows bytes and rows; it must not know what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE = 1 << 20  # bytes that are read at a time


class Appended:
    """`offset`: where the next line begins. A file that is not there yet has no rows."""

    def __init__(self, path: Path, offset: int = 0):
        self.path, self.offset = path, offset

    def lines(self) -> Iterator[bytes]:
        """Whole lines that were appended since. `offset` is behind a line once the next one is asked for."""
        rest = b""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            while piece := file.read(PIECE):
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield line
                    self.offset += len(line) + 1

    def rows(self) -> Iterator[dict[str, Any]]:
        """The same as rows; a damaged line is none."""
        for line in self.lines():
            if (row := as_row(line)) is not None:
                yield row

    @property
    def waiting(self) -> int:
        """Bytes that were appended since; below zero where the file was cut."""
        try:
            return self.path.stat().st_size - self.offset
        except FileNotFoundError:
            return 0


def as_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
