"""A second copy of every complete snapshot, at any URL that fsspec knows. All of it blocks: call it in a thread.

URL/NAME-FINGERPRINT/LINEAGE-STEP/stage-I.safetensors, hashes.json      the last is written last: it is whole then
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from protomodels_cli.coordinator.snapshots import HASHES
from protomodels_cli.errors import UserError

SNAPSHOT = re.compile(r"\d{4,}-\d{8,}")


class Copies:
    def __init__(self, url: str, run: str):
        """`run`: its own name there, which no other run has."""
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as e:
            raise UserError(
                f"snapshots.copy_to: {url}: {e}", "install what it names (for s3:// that is s3fs), or take another URL"
            ) from None
        self.url = f"{url.rstrip('/')}/{run}"
        self._root = f"{root.rstrip('/')}/{run}"

    def bring_up_to_date(self, snapshots: Collection[Path]) -> None:
        """Copy these where they are not there yet, then delete the others; one whose folder is gone here is only kept.
        Raises whatever the store raises."""
        self._files.makedirs(self._root, exist_ok=True)
        there = {str(path).rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False)}
        for folder in snapshots:
            whole = folder.name in there and self._files.exists(self._at(folder.name, HASHES))
            if not whole and folder.exists():
                self._copy(folder)
        for name in there - {folder.name for folder in snapshots}:
            if SNAPSHOT.fullmatch(name):
                self._files.rm(self._at(name), recursive=True)

    def _copy(self, folder: Path) -> None:
        self._files.makedirs(self._at(folder.name), exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda path: path.name == HASHES):
            self._files.put_file(str(file), self._at(folder.name, file.name))

    def get(self, snapshot: str, file: str, to: Path) -> None:
        """Raises FileNotFoundError if it is not there, and whatever else the store raises."""
        self._files.get_file(self._at(snapshot, file), str(to))

    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))


def in_words(error: Exception) -> str:
    words: Any = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(words).splitlines()[0][:200]
