"""Atomic file writes: a file is complete or does not exist, also after a power cut. And where the cache is, and how
much room a disk has."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def user_cache() -> Path:
    return Path(os.environ.get("PMTRAIN_CACHE") or Path.home() / ".cache" / "pmtrain")


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
