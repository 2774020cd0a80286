"""Dataclasses as JSON and back, to the bit and checked: what journal and snapshots are written in. Knows no files."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

T = TypeVar("T")


def as_json(value: Any, indent: int | None = None) -> bytes:
    return to_json(value, indent=indent, inf_nan_mode="constants")


def from_json(kind: type[T], content: str | bytes) -> T:
    """Raises pydantic's ValidationError, which is a ValueError."""
    return _checker(kind).validate_json(content, strict=True)


@cache
def _checker(kind: type[T]) -> TypeAdapter[T]:
    """Made when it is needed: a coordinator that comes back waits for it, and most kinds of records are rare."""
    return TypeAdapter(kind)
