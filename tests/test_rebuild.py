"""Going back to a snapshot, with a journal or without one, brings back the same things."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_snapshots import CONTENTS, HASHES, RUN

from protomodels_cli.coordinator.history import (
    Began,
    Decided,
    Evaluated,
    History,
    Paused,
    Placed,
    Record,
    Resumed,
    RolledBack,
    Saved,
    beginning,
    fold,
)
from protomodels_cli.coordinator.journal import read
from protomodels_cli.coordinator.notices import Notice
from protomodels_cli.coordinator.reasons import ByOwner, StagesLost
from protomodels_cli.coordinator.rebuild import rebuild
from protomodels_cli.coordinator.rebuild_notices import JournalRebuilt
from protomodels_cli.coordinator.snapshots.store import Snapshots

PLACED = Placed(1, (2, 2), (("p0",), ("p1",)))
PAUSED = Paused(ByOwner())


def decided(step: int) -> Decided:
    return Decided(step, True, 1e-3, 1.0, 5.0 - step, 1.0, 1, 10, 20)


def after(*records: Record) -> History:
    history = beginning("u")
    for record in records:
        history = fold(history, record)
    return history


TO_STEP_2 = PLACED, decided(1), Evaluated(1, 4.5), decided(2), Began(2)


def save(run_dir: Path, history: History) -> Snapshots:
    """The newest snapshot of this history, with its name; and a journal that nobody can read."""
    (run_dir / "journal.sqlite").write_bytes(b"")
    snapshots = Snapshots(run_dir / "snapshots", RUN, (1, "t"), run_dir / "basis")
    for stage, content in enumerate(CONTENTS):
        path = snapshots.coming(*history.newest.key, stage, HASHES[stage])
        path.write_bytes(content)
        snapshots.arrived(path)
    snapshots.settle(lambda: history)
    return snapshots


def rebuilt(run_dir: Path) -> History:
    told: list[Notice] = []
    rebuild(run_dir, RUN, beginning("u"), told.append)
    assert isinstance(told[-1], JournalRebuilt)
    return read(run_dir / "journal.sqlite", RUN)[0]


def test_a_rebuilt_history_is_that_of_a_rollback(tmp_path: Path):
    """The held-out loss is that of the snapshot's step, also where it was measured while that was being uploaded."""
    saved = after(*TO_STEP_2, Evaluated(2, 4.0), Saved(2, HASHES))
    assert saved.newest.eval_loss == 4.0
    on = fold(fold(saved, decided(3)), Evaluated(3, 3.5))
    back = fold(on, RolledBack(2, 1, 2, StagesLost((0,), 3)))
    assert (back.step, back.decision, back.eval_loss, back.loss_first, back.redone) == (2, None, 4.0, 4.0, 1)
    save(tmp_path, saved)
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "lineage": 1, "step": 3}\n')
    found = rebuilt(tmp_path)
    assert found.lineage > 1000
    new = {"lineage": 1, "generation": 1, "stage_holders": (), "dropped": (), "synced": -1, "evaluated": -1}
    assert replace(found, **new) == replace(back, **new)


def test_going_back_to_the_beginning_forgets_the_losses():
    history = fold(after(PLACED, decided(1), Evaluated(1, 4.5)), RolledBack(2, 0, 0, StagesLost((0,), 1)))
    assert (history.eval_loss, history.loss_first) == (None, None)


@pytest.mark.parametrize("since", [(), (Resumed(), PAUSED), (Resumed(),)])
def test_a_run_that_was_paused_when_it_was_saved_is_paused(tmp_path: Path, since: tuple[Record, ...]):
    history = after(*TO_STEP_2, PAUSED, *since, Saved(2, HASHES))
    save(tmp_path, history)
    assert rebuilt(tmp_path).paused == history.paused


def test_a_whole_snapshot_that_a_kill_kept_from_its_name_is_used(tmp_path: Path):
    save(tmp_path, after(*TO_STEP_2, Saved(2, HASHES)))
    (tmp_path / "snapshots/0001-00000002").rename(tmp_path / "snapshots/.0001-00000002")
    assert rebuilt(tmp_path).newest.step == 2
    assert (tmp_path / "snapshots/0001-00000002").is_dir()
