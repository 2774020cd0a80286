"""Data that cannot be used, with what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

from protomodels_cli import installing
from protomodels_cli.errors import UserError

_NOT_THERE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class DataError(UserError):
    """Text or tokens that cannot be trained on."""


class Outage(DataError):
    """Something gave way that may hold the next time; what was done until then is kept."""


def unreadable(path: Path, error: OSError) -> DataError:
    """An outage: once the file can be read it holds what it held, or it is another file with work of its own."""
    why, fix = error.strerror, "check that the file exists and is readable"
    if error.errno is None:  # a library's own, of what the file holds
        return DataError(f"{path} cannot be read: {error}", fix, "unreadable")
    if error.errno not in _NOT_THERE:
        fix = "check the disk or the network share that the file is on, and start again"
    return Outage(f"{path} cannot be read: {why}", fix, "unreadable")


def missing_package(what: str, package: str, requirement: str) -> DataError:
    return DataError(f"{what} needs the package {package}", installing.package(requirement), "missing_package")
