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
_MAKING, _REACHED = ".making-", "reached.json"
_STALE = 7 * 24 * 3600.0  # seconds after which nobody will go on with it


def in_silence(what: Doing, done: int, total: int | None) -> None:
    pass


@contextlib.contextmanager
def workshop(folder: Path, show: Show) -> Iterator[Path]:
    """The folder beside `folder` in which its content is made. One process at a time has it, and others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    work = folder.with_name(f"{_MAKING}{folder.name}")
    with _lock_file(work) as lock:
        if not _locked(lock):
            show("waiting", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        work.mkdir(exist_ok=True)
        yield work


def reached(work: Path) -> dict[str, Any] | None:
    """How far whoever worked here before got."""
    try:
        found = json.loads((work / _REACHED).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
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


@contextlib.contextmanager
def _lock_file(work: Path) -> Iterator[int]:
    """A file, and open for writing: a lock on a folder is not seen by other machines with the same cache on NFS. It
    stays, since one that is removed could be locked by one process while another makes and locks the next."""
    path = work.parent / "locks" / work.name.removeprefix(_MAKING)
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(cache: Path) -> None:
    """Remove what was interrupted long ago."""
    for work in cache.glob(f"{_MAKING}*"):
        with contextlib.suppress(OSError):
            if time.time() - work.stat().st_mtime > _STALE:
                with _lock_file(work) as lock:
                    if _locked(lock):
                        shutil.rmtree(work)
