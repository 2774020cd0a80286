"""Every way to damage a journal that we can think of: each is given a run's directory."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path


def sql(*statements: str) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
            for statement in statements:
                assert db.execute(statement).rowcount > 0, "it did something"

    return damage


def without_log(run_dir: Path) -> None:
    for name in ("journal.sqlite-wal", "journal.sqlite-shm"):
        (run_dir / name).unlink(missing_ok=True)


def whole_file(run_dir: Path) -> Path:
    """The journal in one file, with all of its log."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return run_dir / "journal.sqlite"


def content(new: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        file = whole_file(run_dir)
        file.write_bytes(new(file.read_bytes()))

    return damage


def a_folder(run_dir: Path) -> None:
    gone(run_dir)
    (run_dir / "journal.sqlite").mkdir()


def gone(run_dir: Path) -> None:
    without_log(run_dir)
    (run_dir / "journal.sqlite").unlink()


def short_log(run_dir: Path) -> None:
    log = run_dir / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    (run_dir / "journal.sqlite-shm").unlink()


DAMAGES = {
    "empty": content(lambda b: b""),
    "zeroed": content(lambda b: bytes(len(b))),
    "random": content(lambda b: random.Random(1).randbytes(len(b))),
    "random-behind-header": content(lambda b: b[:100] + random.Random(2).randbytes(len(b) - 100)),
    "text": content(lambda b: b"SQLite format 3\0, but not really"),
    "an empty database": content(lambda b: empty_database()),
    "gone": gone,
    "a folder": a_folder,
    "without its log": without_log,
    "with half of its log": short_log,
    "the first row is missing": sql("DELETE FROM records WHERE id = (SELECT min(id) FROM records)"),
    "a row is missing": sql("DELETE FROM records WHERE id = 7"),
    "the last row is missing": sql("DELETE FROM records WHERE id = (SELECT max(id) FROM records)"),
    "all rows are missing": sql("DELETE FROM records"),
    "a row's body": sql("UPDATE records SET body = replace(body, 'true', 'false') WHERE kind = 'Decided'"),
    "a row's time": sql("UPDATE records SET at = at + 1 WHERE id = 20"),
    "a row's kind": sql("UPDATE records SET kind = 'Guessed' WHERE id = 20"),
    "two rows change places": sql(
        "UPDATE records SET id = -1 WHERE id = 8",
        "UPDATE records SET id = 8 WHERE id = 9",
        "UPDATE records SET id = 9 WHERE id = -1",
    ),
    "the history it began with": sql("UPDATE folded SET history = replace(history, '\"step\":0', '\"step\":3')"),
    "no history": sql("DELETE FROM folded"),
    "no identity": sql("DELETE FROM identity"),
    "no head": sql("DELETE FROM head"),
    "another format": sql("UPDATE identity SET body = replace(body, '\"format\":3', '\"format\":4')"),
    "another spec": sql('UPDATE identity SET body = replace(body, \'"spec_sha256":"\', \'"spec_sha256":"0\')'),
}


KINDS = {"empty": "empty", "gone": "missing", "a folder": "unreadable"}  # of those that are not just damaged
KINDS |= {"another format": "other_format", "another spec": "other_spec"}
KINDS |= dict.fromkeys(("without its log", "with half of its log"), "outdated")


def empty_database() -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE t (x)")
        return db.serialize()
