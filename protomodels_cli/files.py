"""Atomic file writes: a file is complete or does not exist, also after a power cut. And where things are kept on this
machine by default, and how much room a disk has."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def _base(variable: str, default: str) -> Path:
    """Ours in a base directory of the XDG specification, by which a path that is not absolute counts for nothing."""
    chosen = os.environ.get(variable, "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / default) / "pmtrain"


def user_cache() -> Path:
    """What can be made again: tokens. A cache that lies in ~/.cache stays in use where $XDG_CACHE_HOME has none."""
    if chosen := os.environ.get("PMTRAIN_CACHE"):
        return Path(chosen)
    here, before = _base("XDG_CACHE_HOME", ".cache"), Path.home() / ".cache" / "pmtrain"
    return before if before.exists() and not here.exists() else here


def peer_homes() -> list[Path]:
    """Where peers have their folders, one for each run: new ones in the first, the others where an earlier version put
    them. Not in the cache, which may be emptied: a peer's parts spare a run a rollback."""
    data, cache = _base("XDG_DATA_HOME", ".local/share"), user_cache()
    first = cache if os.environ.get("PMTRAIN_CACHE") else data
    return list(dict.fromkeys(home / "peers" for home in (first, data, cache, Path.home() / ".cache" / "pmtrain")))


def peer_home(run: str) -> Path:
    """Where a peer's folder of this run is, and if there is none yet, is to be. `run`: as folders' names end with."""
    return next((home for home in peer_homes() if any(home.glob(f"*-{run}"))), peer_homes()[0])


def relay_home() -> Path:
    """Where a relay keeps its secret and its books."""
    return _base("XDG_DATA_HOME", ".local/share") / "relay"


def free_bytes(folder: Path) -> int:
    """That whoever runs this may still write there. Raises OSError."""
    return shutil.disk_usage(folder).free


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """The file never has a wider mode than this, not even while it is written: nobody else can read a key."""
    work = path.with_name(f".{path.name}.partial")
    work.unlink(missing_ok=True)  # what a crash left may have another mode, or lead elsewhere
    handle = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        put_in_place(work, path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def put_in_place(work: Path, path: Path) -> None:
    """Rename a finished file to its final name, durably."""
    with work.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(work, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
