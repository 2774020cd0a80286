"""The lines of a file that a program of ours writes, as far as they are whole, and those that come later.

Reads alone: the file may be cut to its last whole line (after a crash), rotated, or not be there yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

EVERY = 0.3  # seconds between two looks at a file that is followed


class Tail:
    """`rotated`: the files that it was before, the oldest first, are read too."""

    def __init__(self, path: Path, rotated: bool = False):
        self._path, self._at, self._file = path, 0, (0, 0)
        self._before = sorted(path.parent.glob(f"{path.name}.[0-9]*"), key=_number, reverse=True) if rotated else []

    def rest(self) -> Iterator[str]:
        """The whole lines since the last call."""
        while self._before:
            yield from self._lines(self._before.pop(0), 0)
        try:
            facts = os.stat(self._path)
        except FileNotFoundError:
            return
        if (facts.st_dev, facts.st_ino) != self._file:
            if self._at:  # rotated: the end of what was read so far has another name now
                yield from self._lines(self._path.with_name(f"{self._path.name}.1"), self._at, self._file)
            self._file, self._at = (facts.st_dev, facts.st_ino), 0
        elif facts.st_size < self._at:
            self._at = 0
        yield from self._lines(self._path, self._at)

    def _lines(self, path: Path, at: int, only: tuple[int, int] | None = None) -> Iterator[str]:
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if only is not None and (facts.st_dev, facts.st_ino) != only:
                    return
                file.seek(at)
                for line in file:
                    if not line.endswith(b"\n"):  # half a line: the rest comes, or never will
                        return
                    if path == self._path:
                        self._at += len(line)
                    yield line[:-1].decode(errors="replace")
        except FileNotFoundError:
            return


def _number(path: Path) -> int:
    end = path.name.rpartition(".")[2]
    return int(end) if end.isdigit() else 0
