"""The journal: records on disk before anything that follows from them leaves. SQLite in WAL mode, synced each time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from protomodels_cli.coordinator.history import RECORDS, Record


class Journal:
    def __init__(self, path: Path):
        # Written from a thread beside the event loop, one write at a time.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS records (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, "
            "body TEXT NOT NULL) STRICT"
        )

    def append(self, records: Iterable[Record], now: float) -> None:
        """All of them or none; on disk when this returns."""
        rows = [(now, type(r).__name__, json.dumps(dataclasses.asdict(r))) for r in records]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO records (at, kind, body) VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as e:
            with contextlib.suppress(sqlite3.Error):  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise OSError(f"journal: {e}") from None

    def close(self) -> None:
        self._db.close()


def read(path: Path) -> Iterator[tuple[float, Record]]:
    """The records of a journal, oldest first, without touching it."""
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        for at, kind, body in db.execute("SELECT at, kind, body FROM records ORDER BY id"):
            record: Callable[..., Record] = RECORDS[kind]
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(body).items()}
            yield at, record(**fields)
    finally:
        db.close()
