"""Dataclasses as JSON and back, to the bit and checked: what journal and snapshots are written in. Knows no files."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

T = TypeVar("T")
_CHECKERS: dict[type, TypeAdapter[Any]] = {}  # made when needed: most kinds of records are rare, and a restart waits


def as_json(value: Any, indent: int | None = None) -> bytes:
    return to_json(value, indent=indent, inf_nan_mode="constants")


def from_json(kind: type[T], content: str | bytes) -> T:
    """Raises pydantic's ValidationError, which is a ValueError."""
    if kind not in _CHECKERS:
        _CHECKERS[kind] = TypeAdapter(kind)
    checked: T = _CHECKERS[kind].validate_json(content, strict=True)
    return checked
