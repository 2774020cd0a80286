"""The journal: records on disk before anything that follows from them leaves. SQLite in WAL mode, synced each time.

Now and then the records so far are folded into one history and dropped, so that a run of a million steps is read back
as fast as one of a thousand. A write waits for one sync and no more: folding is part of the write that is due then, and
the log is copied into the database beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from protomodels_cli.coordinator.history import RECORDS, Adopted, Decided, Ended, History, Mark, Paused, Record, fold

FOLD_EVERY = 5000  # records
COPY_EVERY = 500  # writes
LONGEST_LOG = 32 << 20  # bytes

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
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_TABLES)
        self.history, self.last_written = first, 0.0
        found = _folded(self._db)
        if found is None:
            with self._transaction():
                self._db.execute("INSERT INTO folded VALUES (0, 0, ?)", (_to_json(first),))
        else:
            _, self.last_written, self.history = found
        self._writes, self._copying = 0, threading.Thread()
        self._loose = 0  # records since they were last folded
        for at, record in _records(self._db):
            self.history, self.last_written = fold(self.history, record), at
            self._loose += 1

    def append(self, records: Iterable[Record], now: float) -> None:
        """All of them or none; on disk when this returns."""
        records, history = list(records), self.history
        rows = [(now, type(r).__name__, json.dumps(dataclasses.asdict(r))) for r in records]
        for record in records:
            history = fold(history, record)
        loose = self._loose + len(records)
        with self._transaction():
            self._db.executemany("INSERT INTO records (at, kind, body) VALUES (?, ?, ?)", rows)
            if loose >= FOLD_EVERY:
                self._fold(history, now)
                loose = 0
        self.history, self._loose = history, loose
        self._copy_the_log()

    def _fold(self, history: History, now: float) -> None:
        [last] = self._db.execute("SELECT max(id) FROM records").fetchone()
        self._db.execute("DELETE FROM folded")
        self._db.execute("INSERT INTO folded VALUES (?, ?, ?)", (last, now, _to_json(history)))
        self._db.execute("DELETE FROM records WHERE id <= ?", (last,))

    def _copy_the_log(self) -> None:
        """Into the database, where it is due: else the log would only grow. Writes go on meanwhile.

        The log begins anew at the first write after all of it was copied: never, if writes come faster than that."""
        self._writes += 1
        if self._writes < COPY_EVERY or self._copying.is_alive():
            return
        self._writes = 0
        if self._path.with_name(f"{self._path.name}-wal").stat().st_size > LONGEST_LOG:
            _checkpoint(self._path, "TRUNCATE")
            return
        self._copying = threading.Thread(target=_checkpoint, args=(self._path, "PASSIVE"), daemon=True)
        self._copying.start()

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
        if self._copying.ident is not None:
            self._copying.join()
        self._db.close()


def _checkpoint(path: Path, mode: str) -> None:
    """What fails here is tried again later: nothing rests on it but the log's size."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA wal_checkpoint({mode})")


def read(path: Path) -> tuple[History, float]:
    """The history in a journal, without touching it, and when it was last written to."""
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        db.execute("BEGIN")  # one look: it may be folded meanwhile
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
