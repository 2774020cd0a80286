"""Dataclasses as JSON and back, to the bit and checked: what journal and snapshots are written in. Knows no files."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, with_config
from pydantic_core import to_json

T = TypeVar("T")
_CHECKERS: dict[type, TypeAdapter[Any]] = {}  # made when needed: most kinds of records are rare, and a restart waits


def as_json(value: Any, indent: int | None = None) -> bytes:
    return to_json(value, indent=indent, inf_nan_mode="constants")


def from_json(kind: type[T], content: str | bytes) -> T:
    """Raises pydantic's ValidationError, which is a ValueError."""
    if kind not in _CHECKERS:
        # A field that is not known is refused, also in what is nested: what another version meant cannot be guessed.
        _CHECKERS[kind] = TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind))
    checked: T = _CHECKERS[kind].validate_json(content, strict=True)
    return checked
