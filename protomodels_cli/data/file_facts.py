"""What files hold: their sha256, and whether it is text. Read once, and remembered until a file changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from typing import Any

from protomodels_cli.data.errors import unreadable
from protomodels_cli.data.sources import is_binary
from protomodels_cli.files import write_whole

_CHUNK = 1 << 20
_IN_THREADS = 64 << 20  # from so many bytes on, files are hashed side by side


def stamp(path: Path) -> list[int]:
    """Different after every write, even if the modification time is set back."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class FileFacts:
    """`memory` is the file in which they are kept from one start to the next; if it cannot be written, files are read
    again every time."""

    def __init__(self, memory: Path):
        self._memory, self._lock = memory, Lock()
        self._kept = self._load()
        self._seen: dict[str, dict[str, Any]] = {}
        self.binary: list[Path] = []  # those that were asked about

    def is_binary(self, path: Path) -> bool:
        found = self._of(path)
        if "binary" not in found:
            found["binary"] = is_binary(path)
        if found["binary"]:
            self.binary.append(path)
        return bool(found["binary"])

    def sha256(self, paths: Iterable[Path], read: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
        """Of each path once. `read` hears how many bytes of all that must be read have been read."""
        wanted = {path: self._of(path) for path in dict.fromkeys(paths)}
        unknown = {path: found for path, found in wanted.items() if "sha256" not in found}
        total, done, stopped = sum(found["stamp"][0] for found in unknown.values()), 0, False

        def one(path: Path) -> None:
            nonlocal done
            digest = hashlib.sha256()
            try:
                with path.open("rb") as file:
                    while not stopped and (chunk := file.read(_CHUNK)):
                        digest.update(chunk)
                        with self._lock:
                            done += len(chunk)
                            read(done, total)
            except OSError as e:
                raise unreadable(path, e) from None
            unknown[path]["sha256"] = digest.hexdigest()

        if total < _IN_THREADS:
            for path in unknown:
                one(path)
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor() as threads:
                try:
                    list(threads.map(one, unknown))
                finally:
                    stopped = True  # of importance after Ctrl-C: nobody waits for the rest of a large file
        return [found["sha256"] for found in wanted.values()]

    def stamps(self) -> dict[Path, list[int]]:
        """Of all files that were asked about, as they were then."""
        return {Path(name): found["stamp"] for name, found in self._seen.items()}

    def save(self) -> None:
        if self._seen != self._kept:
            with contextlib.suppress(OSError):
                self._memory.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._memory, json.dumps(self._seen).encode())

    def _of(self, path: Path) -> dict[str, Any]:
        name = str(path)
        if name not in self._seen:
            try:
                now = stamp(path)
            except OSError as e:
                raise unreadable(path, e) from None
            kept = self._kept.get(name)
            self._seen[name] = dict(kept) if isinstance(kept, dict) and kept.get("stamp") == now else {"stamp": now}
        return self._seen[name]

    def _load(self) -> dict[str, Any]:
        try:
            found = json.loads(self._memory.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
