"""Metrics as JSON lines: one row per thing that happened, flushed as it happens."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

LONGEST_LINE = 1 << 20


class JsonLines:
    """A run never writes over another; one that goes on writes behind what is there."""

    def __init__(self, path: Path, go_on: bool = False):
        if go_on:
            _drop_half_a_line(path)
        self._file = path.open("a" if go_on else "x", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """With the time of writing, in seconds since 1970."""
        self._file.write(json.dumps(strict({**row, "at": time.time()}), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _drop_half_a_line(path: Path) -> None:
    """Cut off a last line without an end: a kill in the middle of a write leaves one."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


def first_step(path: Path) -> dict[str, Any] | None:
    """The first row of a step."""
    with path.open("rb") as file:
        return next(filter(_is_step, filter(None, map(_row, file))), None)


def last_step(path: Path) -> dict[str, Any] | None:
    """The last row of a step, however long the file."""
    return next(filter(_is_step, rows_from_last(path)), None)


def rows_from_last(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, the very last one first. Half a line, which a kill may leave at the end, is no row."""
    with path.open("rb") as file:
        at, rest, ended = file.seek(0, os.SEEK_END), b"", False
        while at > 0:
            at, end = max(0, at - LONGEST_LINE), at
            file.seek(at)
            rest, *lines = (file.read(end - at) + rest).split(b"\n")
            if lines and not ended:
                lines.pop()
                ended = True
            if at == 0 and ended:
                lines.insert(0, rest)
            yield from filter(None, map(_row, reversed(lines)))


def _row(line: bytes) -> dict[str, Any] | None:
    """None where the line is damaged: a power cut may leave zeros in the middle of a file."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_step(row: dict[str, Any]) -> bool:
    return row.get("event") == "step" and all(isinstance(row.get(name), int) for name in ("lineage", "step"))


def strict(value: Any) -> Any:
    """JSON has no NaN or infinity: they become their names, so that any reader can read the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return value
