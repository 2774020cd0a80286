"""The journal brings the history back, stays small, and is never half written."""

from __future__ import annotations

import contextlib
import errno
import math
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_spec
from machine_bench import Bench, to_step

from protomodels_cli.coordinator import journal as journals
from protomodels_cli.coordinator.as_json import from_json
from protomodels_cli.coordinator.history import (
    Began,
    Decided,
    Dropped,
    Ended,
    Forgot,
    History,
    Mark,
    Placed,
    RolledBack,
    Saved,
    Synced,
    beginning,
    fold,
)
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.journal import Journal, JournalError, create, read
from protomodels_cli.coordinator.reasons import StagesLost

RUN = RunIdentity("run", "spec")


def new(path: Path, first: History) -> Journal:
    create(path, RUN, first)
    return Journal(path, RUN)


def a_history(**sections: Any) -> Bench:
    update = {"interval": 3, "window": 2, "delay": 1}
    b = Bench(make_spec(stages=2, steps=8, subspace={"sync_interval": 2, "update": update}, **sections))
    b.join(0, 1, 2)
    to_step(b, 6)
    b.lose(b.state.history.holders[0])
    return b


@pytest.mark.parametrize("fold_every", [1, 3, 1000])
def test_the_journal_brings_the_history_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fold_every: int):
    monkeypatch.setattr(journals, "FOLD_EVERY", fold_every)
    b = a_history(snapshots={"interval": 2})
    b.finish()
    kinds = {type(r) for r in b.records}
    assert {Placed, Decided, Synced, Began, Saved, Forgot, RolledBack, Ended} <= kinds
    history = b.first
    journal = new(tmp_path / "journal.sqlite", b.first)
    for i, record in enumerate(b.records):
        journal.append([record], float(i))
        history = fold(history, record)
        if i % 5 == 0:
            journal.close()
            journal = Journal(tmp_path / "journal.sqlite", RUN)
        assert journal.history == history
    assert read(tmp_path / "journal.sqlite", RUN) == (b.state.history, float(len(b.records) - 1))
    journal.close()


def test_a_long_journal_is_folded_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journals, "FOLD_EVERY", 500)
    journal = new(tmp_path / "j.sqlite", beginning("u"))
    for start in range(1, 20_001, 100):
        steps = range(start, start + 100)
        journal.append([Decided(step, True, 1e-3, 1.0, 3.0, 1.0, 1, 10, 20) for step in steps], float(start))
    journal.close()
    db = sqlite3.connect(tmp_path / "j.sqlite")
    assert db.execute("SELECT count(*) FROM records").fetchone()[0] < 500
    history, _ = read(tmp_path / "j.sqlite", RUN)
    assert (history.step, history.backward_bytes) == (20_000, 400_000)


def test_the_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Copied beside the writes, and where they come too fast for that, by one of them."""
    monkeypatch.setattr(journals, "COPY_EVERY", 10)
    monkeypatch.setattr(journals, "LONGEST_LOG", 1 << 20)
    journal, log = new(tmp_path / "j.sqlite", beginning("u")), tmp_path / "j.sqlite-wal"
    for step in range(1, 3001):
        journal.append([Decided(step, True, 1e-3, 1.0, 3.0, 1.0, 1, 10, 20)], float(step))
    assert log.stat().st_size < 2 << 20
    for step in range(3001, 3012):
        journal.append([Decided(step, True, 1e-3, 1.0, 3.0, 1.0, 1, 10, 20)], float(step))
        journal._copying.join()  # as if it had been given the time
    with contextlib.closing(sqlite3.connect(tmp_path / "j.sqlite")) as db:
        assert db.execute("PRAGMA wal_checkpoint").fetchone()[1] < 50, "it began anew"
    journal.close()
    assert not log.exists()


def test_a_failed_write_leaves_the_journal_as_it_was(tmp_path: Path):
    journal = new(tmp_path / "j.sqlite", beginning(""))
    journal.append([Synced(1)], 1.0)
    with pytest.raises(OSError, match="journal"):
        journal.append([Synced(2), Synced(2)], math.nan)  # which is null to the table, and refused
    assert journal.history.synced == 1
    journal.append([Synced(3)], 3.0)
    assert read(tmp_path / "j.sqlite", RUN) == (replace(beginning(""), synced=3), 3.0)


def test_a_full_disk_is_told_from_other_failures(tmp_path: Path):
    journal = new(tmp_path / "j.sqlite", beginning(""))
    journal._db.execute("PRAGMA max_page_count = 1")  # as large as it is, and no larger
    with pytest.raises(OSError, match="journal") as failed:
        journal.append([Synced(step) for step in range(1, 1000)], 1.0)
    assert failed.value.errno == errno.ENOSPC


@pytest.mark.parametrize("where", ["record", "nested", "history"])
def test_a_field_that_this_version_does_not_know_is_refused(tmp_path: Path, where: str):
    """Written by another version, say: what it means cannot be guessed."""
    journal = new(tmp_path / "j.sqlite", beginning(""))
    journal.append([RolledBack(2, 0, 0, StagesLost((0,), 1))], 1.0)
    journal.close()
    table, column, old = {
        "record": ("records", "body", '{"lineage"'),
        "nested": ("records", "body", '{"stages"'),
        "history": ("folded", "history", '{"snapshots"'),
    }[where]
    with contextlib.closing(sqlite3.connect(tmp_path / "j.sqlite")) as db, db:
        [text] = db.execute(f"SELECT {column} FROM {table}").fetchone()
        assert text.count(old) >= 1
        changed = text.replace(old, '{"surprise": 1, ' + old[1:], 1)
        body = db.execute("SELECT body FROM identity").fetchone()[0]
        start = journals._start(body)
        if table == "records":
            start = db.execute("SELECT chain FROM folded").fetchone()[0]
            chain = journals._link(start, 1, 1.0, "RolledBack", changed)
        else:
            chain = journals._link(start, 0, 0.0, "folded", changed)
        db.execute(f"UPDATE {table} SET {column} = ?, chain = ?", (changed, chain))
    with pytest.raises(JournalError, match="surprise") as error:
        read(tmp_path / "j.sqlite", RUN)
    assert error.value.kind == "journal_damaged"


def test_records_from_before_a_field_was_added_are_read_as_they_were_meant():
    assert from_json(Forgot, '{"lineage": 1, "step": 4}') == Forgot(1, 4, unusable=False)
    assert from_json(Dropped, '{"lineage": 1, "step": 4, "complete": true}') == Dropped(1, 4, True, unusable=False)
    assert from_json(Mark, '{"lineage": 1, "step": 4, "basis_version": 0, "basis_sha256": "u"}').paused is None
