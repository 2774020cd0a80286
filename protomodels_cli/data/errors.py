"""Data that cannot be used, with what to do about it."""

from __future__ import annotations

from pathlib import Path

from protomodels_cli.errors import UserError


class DataError(UserError):
    """Text or tokens that cannot be trained on."""


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read: {error.strerror}", "check that the file exists and is readable", "unreadable"
    )
