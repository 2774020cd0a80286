"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """The file has no wider mode than this at any moment: what a key is written to is never readable by others."""
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
    """Give a finished file its name, for good."""
    with work.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(work, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
