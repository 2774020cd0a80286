"""The journal: records on disk before anything that follows from them leaves. SQLite in WAL mode, synced each time.

Now and then the records so far are folded into one history and dropped, so that a run of a million steps is read back
as fast as one of a thousand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from protomodels_cli.coordinator.history import RECORDS, Adopted, Decided, Ended, History, Mark, Paused, Record, fold

FOLD_EVERY = 5000  # records

_TABLES = """
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS folded (id INTEGER PRIMARY KEY, at REAL NOT NULL, history TEXT NOT NULL) STRICT;
"""


class Journal:
    def __init__(self, path: Path, first: History):
        """`first` is the history before any record."""
        # Written from a thread beside the event loop, one write at a time.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_TABLES)
        self.history = first
        found = _folded(self._db)
        if found is None:
            self._write("INSERT INTO folded VALUES (0, 0, ?)", [(_to_json(first),)])
        else:
            self.history = found[2]
        self._loose = 0  # records since they were last folded
        for _, record in _records(self._db):
            self.history = fold(self.history, record)
            self._loose += 1

    def append(self, records: Iterable[Record], now: float) -> None:
        """All of them or none; on disk when this returns."""
        records = list(records)
        rows = [(now, type(r).__name__, json.dumps(dataclasses.asdict(r))) for r in records]
        self._write("INSERT INTO records (at, kind, body) VALUES (?, ?, ?)", rows)
        for record in records:
            self.history = fold(self.history, record)
        self._loose += len(records)
        if self._loose >= FOLD_EVERY:
            self._fold(now)

    def _fold(self, now: float) -> None:
        [last] = self._db.execute("SELECT max(id) FROM records").fetchone()
        with self._transaction():
            self._db.execute("DELETE FROM folded")
            self._db.execute("INSERT INTO folded VALUES (?, ?, ?)", (last, now, _to_json(self.history)))
            self._db.execute("DELETE FROM records WHERE id <= ?", (last,))
        self._loose = 0

    def _write(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        with self._transaction():
            self._db.executemany(statement, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as e:
            with contextlib.suppress(sqlite3.Error):  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise OSError(f"journal: {e}") from None

    def close(self) -> None:
        self._db.close()


def read(path: Path) -> tuple[History, float]:
    """The history in a journal, without touching it, and when it was last written to."""
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        found = _folded(db)
        if found is None:
            raise sqlite3.DatabaseError("it has no history")
        _, last, history = found
        for at, record in _records(db):
            history, last = fold(history, record), at
        return history, last
    finally:
        db.close()


def _folded(db: sqlite3.Connection) -> tuple[int, float, History] | None:
    row = db.execute("SELECT id, at, history FROM folded ORDER BY id DESC LIMIT 1").fetchone()
    return None if row is None else (row[0], row[1], _from_json(row[2]))


def _records(db: sqlite3.Connection) -> Iterator[tuple[float, Record]]:
    for at, kind, body in db.execute("SELECT at, kind, body FROM records ORDER BY id"):
        record: Callable[..., Record] = RECORDS[kind]
        yield at, record(**_tuples(json.loads(body)))


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _to_json(history: History) -> str:
    return json.dumps(dataclasses.asdict(history))


def _from_json(text: str) -> History:
    fields = _tuples(json.loads(text))
    nested: dict[str, Callable[..., Any]] = {
        "decision": Decided,
        "next_basis": Adopted,
        "paused": Paused,
        "ended": Ended,
    }
    for name, kind in nested.items():
        if fields[name] is not None:
            fields[name] = kind(**fields[name])
    for name in ("snapshots", "pending"):
        fields[name] = tuple(map(_mark, fields[name]))
    return History(**fields)


def _mark(fields: dict[str, Any]) -> Mark:
    fields = _tuples(fields)
    if fields["next_basis"] is not None:
        fields["next_basis"] = Adopted(**fields["next_basis"])
    return Mark(**fields)
