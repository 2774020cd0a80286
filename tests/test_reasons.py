"""Reasons that are journalled come back as what they were."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from protomodels_cli.coordinator import reasons as r
from protomodels_cli.coordinator.history import Decided, History, Mark, Paused, Record, RolledBack, beginning, fold
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.journal import Journal, create, read

RUN = RunIdentity("fingerprint", "spec")
ROLLBACKS: list[r.Rollback] = [
    r.StagesLost((0, 2), 5),
    r.StageDiverged(r.Holder(1, "p2", "desk"), "T_fixed", 4),
    r.SnapshotDamaged(4),
    r.NonFinite(3, 9, 0.001),
]
PAUSES: list[r.Pause] = [r.ByOwner(), r.NonFinite(3, 9, 0.001)]


def test_these_are_all():
    for union, rows in ((r.Rollback, ROLLBACKS), (r.Pause, PAUSES)):
        assert set(get_args(get_args(union)[0])) == {type(row) for row in rows}


@pytest.mark.parametrize(
    "record",
    [*(RolledBack(2, 0, 0, why) for why in ROLLBACKS), *(Paused(why) for why in PAUSES)],
    ids=lambda record: f"{type(record).__name__}-{record.why.kind}",
)
@pytest.mark.parametrize("folded", [False, True])
def test_a_journalled_reason_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: RolledBack | Paused, folded: bool
):
    if folded:
        monkeypatch.setattr("protomodels_cli.coordinator.journal.FOLD_EVERY", 1)
    path, first = tmp_path / "journal.sqlite", beginning("u")
    records: list[Record] = [Decided(1, False, 1e-3, 0.0, float("nan"), float("inf"), 1, 10, 20), record]
    create(path, RUN, first)
    journal = Journal(path, RUN)
    journal.append(records, 1.0)
    journal.close()
    found, expected = read(path, RUN)[0], fold(fold(first, records[0]), record)
    assert found.paused == expected.paused
    assert (found.lineage, found.step, found.snapshots) == (expected.lineage, expected.step, expected.snapshots)
    assert isinstance(found, History)
    assert all(isinstance(mark, Mark) for mark in found.snapshots)
