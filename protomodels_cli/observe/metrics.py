"""Metrics as JSON lines: one row per thing that happened, flushed as it happens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any


class JsonLines:
    def __init__(self, path: Path):
        self._file = path.open("x", encoding="utf-8")  # a run never writes over another

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(strict(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def strict(value: Any) -> Any:
    """JSON has no NaN or infinity: they become their names, so that any reader can read the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return value
