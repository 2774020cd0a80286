"""Data that cannot be used, with what to do about it."""

from __future__ import annotations

from pathlib import Path

from protomodels_cli.errors import UserError


class DataError(UserError):
    """Text or tokens that cannot be trained on."""


class Outage(DataError):
    """Something gave way that may hold the next time; what was done until then is kept."""


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read: {error.strerror}", "check that the file exists and is readable", "unreadable"
    )


def missing_package(what: str, package: str, requirement: str) -> DataError:
    return DataError(f"{what} needs the package {package}", f"pip install '{requirement}'", "missing_package")
