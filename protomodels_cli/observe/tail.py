"""The lines of a file that a program of ours writes, as far as they are whole, and those that come later.

Reads alone: the file may be cut to its last whole line (after a crash), rotated, or not be there yet. Knows lines and
rows of JSON; it must not know what they mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVERY = 0.3  # seconds between two looks at a file that is followed


class Tail:
    """`offset`: where the next line begins. `rotated`: the files that it was before, the oldest first, are read too."""

    def __init__(self, path: Path, offset: int = 0, rotated: bool = False):
        self.path, self.offset = path, offset
        self._file: tuple[int, int] | None = None
        self._before = sorted(path.parent.glob(f"{path.name}.[0-9]*"), key=_number, reverse=True) if rotated else []

    def lines(self) -> Iterator[bytes]:
        """The whole lines since the last call. `offset` is behind a line once the next one is asked for."""
        while self._before:
            yield from self._lines(self._before.pop(0), 0)
        try:
            facts = os.stat(self.path)
        except FileNotFoundError:
            return
        here = facts.st_dev, facts.st_ino
        if self._file not in (None, here):  # rotated: the end of what was read so far has another name now
            yield from self._lines(self.path.with_name(f"{self.path.name}.1"), self.offset, self._file)
            self.offset = 0
        elif facts.st_size < self.offset:
            self.offset = 0
        self._file = here
        yield from self._lines(self.path, self.offset)

    def texts(self) -> Iterator[str]:
        return (line.decode(errors="replace") for line in self.lines())

    def rows(self) -> Iterator[dict[str, Any]]:
        """A damaged line is none."""
        return (row for line in self.lines() if (row := as_row(line)) is not None)

    @property
    def waiting(self) -> int:
        """Bytes that were appended since; below zero where the file was cut."""
        try:
            return self.path.stat().st_size - self.offset
        except FileNotFoundError:
            return 0

    def _lines(self, path: Path, at: int, only: tuple[int, int] | None = None) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if only is not None and (facts.st_dev, facts.st_ino) != only:
                    return
                file.seek(at)
                for line in file:
                    if not line.endswith(b"\n"):  # half a line: the rest comes, or never will
                        return
                    yield line[:-1]
                    if path == self.path:
                        self.offset += len(line)
        except FileNotFoundError:
            return


def as_row(line: bytes | str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _number(path: Path) -> int:
    end = path.name.rpartition(".")[2]
    return int(end) if end.isdigit() else 0
