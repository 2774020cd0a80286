"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    work = path.with_name(f".{path.name}.partial")
    handle = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
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
