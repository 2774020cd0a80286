"""The folder in which tokens are made: one for the same tokens, so that what was interrupted goes on there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from protomodels_cli.files import write_whole

Doing = Literal["waiting", "hashing", "learning", "tokenising"]
# What is heard while tokens are made: what is being done, how many bytes of it are done, and of how many if known.
Show = Callable[[Doing, int, int | None], None]
_REACHED = "reached.json"
_STALE = 7 * 24 * 3600.0  # seconds after which nobody will go on with it


def in_silence(what: Doing, done: int, total: int | None) -> None:
    pass


@contextlib.contextmanager
def workshop(folder: Path, show: Show) -> Iterator[Path]:
    """The folder beside `folder` in which its content is made. One process at a time has it, and others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    work = folder.with_name(f".making-{folder.name}")
    while True:
        work.mkdir(exist_ok=True)
        handle = os.open(work, os.O_RDONLY)
        try:
            if not _locked(handle):
                show("waiting", 0, None)
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is(work, handle):  # not renamed or removed by whoever had it before
                yield work
                return
        finally:
            os.close(handle)


def reached(work: Path) -> dict[str, Any] | None:
    """How far whoever worked here before got."""
    try:
        found = json.loads((work / _REACHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def reach(work: Path, state: dict[str, Any]) -> None:
    write_whole(work / _REACHED, json.dumps(state).encode())


def finish(work: Path, folder: Path) -> None:
    """Everything is there: under its own name from now on."""
    (work / _REACHED).unlink(missing_ok=True)
    if folder.exists():  # damaged, or whoever calls this would not have made it again
        shutil.rmtree(folder)
    os.rename(work, folder)


def empty(work: Path) -> None:
    for path in work.iterdir():
        path.unlink()


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _sweep(cache: Path) -> None:
    """Remove what was interrupted long ago."""
    for work in cache.glob(".making-*"):
        with contextlib.suppress(OSError):
            if time.time() - work.stat().st_mtime > _STALE:
                handle = os.open(work, os.O_RDONLY)
                try:
                    if _locked(handle):
                        shutil.rmtree(work)
                finally:
                    os.close(handle)
