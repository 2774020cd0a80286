"""The journal: records on disk before anything that follows from them leaves. SQLite in WAL mode, synced each time.

Now and then the records so far are folded into one history and dropped, so that a run of a million steps is read back
as fast as one of a thousand. A write waits for one sync and no more: folding is part of the write that is due then, and
the log is copied into the database beside it. Each row carries a hash of itself and of the rows before it, back to the
folded history and the run's identity, and the newest hash is stored apart: a journal that was changed is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from protomodels_cli.coordinator.as_json import as_json, from_json
from protomodels_cli.coordinator.history import RECORDS, History, Record, fold
from protomodels_cli.coordinator.identity import RunIdentity, WrongIdentity
from protomodels_cli.errors import UserError
from protomodels_cli.files import put_in_place

FOLD_EVERY = 1000  # records, which are read back in some 25 ms
COPY_EVERY = 500  # writes
LONGEST_LOG = 32 << 20  # bytes

_MAGIC = b"SQLite format 3\0"
_TABLES = """
CREATE TABLE identity (only INTEGER PRIMARY KEY CHECK (only = 1), body TEXT NOT NULL) STRICT;
CREATE TABLE records (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, chain BLOB NOT NULL
) STRICT;
CREATE TABLE folded (id INTEGER PRIMARY KEY, at REAL NOT NULL, history TEXT NOT NULL, chain BLOB NOT NULL) STRICT;
CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), id INTEGER NOT NULL, chain BLOB NOT NULL) STRICT;
"""
T = TypeVar("T")


class JournalError(UserError):
    """A journal that cannot be trusted. `why` follows the name of the file."""

    def __init__(self, path: Path, why: str, kind: str = "damaged"):
        super().__init__(
            f"cannot use the journal: {path} {why}",
            f"restore the run's own journal from a copy, or run `pmtrain coordinator --rebuild --dir {path.parent}`"
            ": a new journal is made from the newest complete snapshot (without one, the run starts over), and nothing "
            "is deleted",
            kind=f"journal_{kind}",
        )


class _Damaged(ValueError):
    """What is wrong with a journal's rows."""


def create(path: Path, identity: RunIdentity, first: History, now: float = 0.0) -> None:
    """A new journal that begins with this history; the file is complete or does not exist."""
    work = path.with_name(f".{path.name}.partial")
    work.unlink(missing_ok=True)
    body, text = _text(identity), _text(first)
    chain = _link(_start(body), 0, now, "folded", text)
    with _as_os_error(), contextlib.closing(sqlite3.connect(work, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN")
        for statement in _TABLES.split(";"):
            db.execute(statement)
        db.execute("INSERT INTO identity VALUES (1, ?)", (body,))
        db.execute("INSERT INTO folded VALUES (0, ?, ?, ?)", (now, text, chain))
        db.execute("INSERT INTO head VALUES (1, 0, ?)", (chain,))
        db.execute("COMMIT")
    put_in_place(work, path)


class Journal:
    """A journal that exists. Written from a thread beside the event loop, one write at a time."""

    def __init__(self, path: Path, identity: RunIdentity):
        """Raises JournalError, without having touched the file; OSError where the disk is full."""
        found = _read(path, identity)
        self._path = path
        self.history, self.last_written = found.history, found.at
        self._id, self._chain, self._loose = found.id, found.chain, found.loose
        self._start = _start(_text(identity))
        with _as_os_error():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
            self._db.execute("PRAGMA synchronous = FULL")
        self._writes, self._copying = 0, threading.Thread()

    def append(self, records: Iterable[Record], now: float) -> None:
        """All of them or none; on disk when this returns."""
        history, last, chain, loose = self.history, self._id, self._chain, self._loose
        rows = []
        for record in records:
            history, last, loose = fold(history, record), last + 1, loose + 1
            kind, body = type(record).__name__, _text(record)
            chain = _link(chain, last, now, kind, body)
            rows.append((last, now, kind, body, chain))
        with self._transaction():
            if loose >= FOLD_EVERY:
                text = _text(history)
                chain = _link(self._start, last, now, "folded", text)
                self._db.execute("DELETE FROM folded")
                self._db.execute("INSERT INTO folded VALUES (?, ?, ?, ?)", (last, now, text, chain))
                self._db.execute("DELETE FROM records")
                loose = 0
            else:
                self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows)
            self._db.execute("UPDATE head SET id = ?, chain = ?", (last, chain))
        self.history, self._id, self._chain, self._loose = history, last, chain, loose
        self._copy_the_log()

    def _copy_the_log(self) -> None:
        """Checkpoint the write-ahead log into the database now and then, or it would only grow. Writes go on meanwhile.

        SQLite restarts the log only after a checkpoint has caught up; under constant writes it never does, so a log
        beyond LONGEST_LOG is truncated while writes wait."""
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
            with _as_os_error():
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
        except OSError:
            with contextlib.suppress(sqlite3.Error):  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        if self._copying.ident is not None:
            self._copying.join()
        self._db.close()


def read(path: Path, identity: RunIdentity) -> tuple[History, float]:
    """The history in a journal, without touching it, and when it was last written to. Raises JournalError."""
    found = _read(path, identity)
    return found.history, found.at


class _Found:
    """The rows of a journal read in order; each must follow from the one before."""

    def __init__(self, db: sqlite3.Connection, right: RunIdentity):
        [body] = _only(db, "SELECT body FROM identity", "identity")
        _parsed(RunIdentity, body, "an identity").check(right)
        self.id, self.at, text, self.chain = _only(db, "SELECT id, at, history, chain FROM folded", "folded history")
        self.history, self.loose = _parsed(History, text, "a folded history"), 0
        if self.chain != _link(_start(body), self.id, self.at, "folded", text):
            raise _Damaged("was changed: hash mismatch in the folded history")
        for number, at, kind, body, chain in db.execute("SELECT id, at, kind, body, chain FROM records ORDER BY id"):
            if number != self.id + 1:
                raise _Damaged(f"is incomplete: row {self.id + 1} is missing")
            if chain != _link(self.chain, number, at, kind, body):
                raise _Damaged(f"was changed: hash mismatch in row {number}")
            if kind not in RECORDS:
                raise _Damaged(f"has a row of a kind that this pmtrain does not know: {kind[:40]!r} (row {number})")
            self.history = fold(self.history, _parsed(RECORDS[kind], body, f"a row {number}"))
            self.id, self.at, self.chain, self.loose = number, at, chain, self.loose + 1
        last, chain = _only(db, "SELECT id, chain FROM head", "newest row")
        if (last, chain) != (self.id, self.chain):
            raise _Damaged(f"is incomplete: the file ends with row {self.id}, and row {last} was written")


def _only(db: sqlite3.Connection, query: str, what: str) -> tuple[Any, ...]:
    rows = db.execute(query).fetchmany(2)
    if len(rows) != 1:
        raise _Damaged(f"has {'more than one' if rows else 'no'} {what}")
    return tuple(rows[0])


def _parsed(kind: type[T], text: str, what: str) -> T:
    try:
        return from_json(kind, text)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _Damaged(
            f"has {what} that this pmtrain cannot read: {first['msg']}{f' ({where})' * bool(where)}"
        ) from None


def _read(path: Path, identity: RunIdentity) -> _Found:
    try:
        with path.open("rb") as file:
            begins = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise JournalError(path, "does not exist", "missing") from None
    except OSError as e:
        raise JournalError(path, f"cannot be read ({e.strerror})", "unreadable") from None
    if not begins:
        raise JournalError(path, "is empty", "empty")
    if begins != _MAGIC:
        raise JournalError(path, "is not an SQLite database")
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
            db.execute("BEGIN")  # all reads see one state: the coordinator may fold the journal meanwhile
            [check] = db.execute("PRAGMA quick_check(1)").fetchone()
            if check != "ok":
                raise _Damaged(f"is damaged (SQLite: {check.splitlines()[-1]})")
            return _Found(db, identity)
    except sqlite3.Error as e:
        if _is_outside(e):
            fix = "free space on that disk, check the permissions and start again; the journal was not changed"
            raise UserError(f"cannot open {path}: {e}", fix, kind="journal_not_opened") from None
        raise JournalError(path, f"is damaged (SQLite: {e})") from None
    except WrongIdentity as e:
        raise JournalError(path, str(e), e.kind) from None
    except _Damaged as e:
        raise JournalError(path, str(e)) from None
    except (ValueError, TypeError, LookupError, OverflowError, MemoryError) as e:
        detail = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise JournalError(path, f"is damaged ({detail})") from None


def _is_outside(error: sqlite3.Error) -> bool:
    """The cause is outside the file, a full or read-only disk, say: nothing is wrong with the file's bytes."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code & 0xFF == sqlite3.SQLITE_IOERR:
        return code not in (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS)
    return code & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    )


def _start(identity: str) -> bytes:
    return hashlib.sha256(identity.encode()).digest()


def _link(before: bytes, number: int, at: float, kind: str, body: str) -> bytes:
    """The hash of a row and of all before it."""
    return hashlib.sha256(before + f"{number} {float(at)!r} {kind}\n{body}".encode()).digest()


def _text(value: RunIdentity | History | Record) -> str:
    return as_json(value).decode()


def _checkpoint(path: Path, mode: str) -> None:
    """A failure here is retried later: only the log's size depends on it."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA wal_checkpoint({mode})")


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as e:
        full = getattr(e, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if full else errno.EIO, f"journal: {e}") from None
