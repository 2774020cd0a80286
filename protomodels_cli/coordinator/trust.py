"""Whether a journal can be believed: it is whole, and nothing beside it is newer. Reads, and changes nothing."""

from __future__ import annotations

from pathlib import Path

from protomodels_cli.coordinator.file_names import JOURNAL, METRICS, SNAPSHOTS
from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.journal import JournalError, read
from protomodels_cli.coordinator.snapshots.store import unknown_to
from protomodels_cli.observe.metrics import last_step


def check_beside(path: Path, identity: RunIdentity, history: History) -> None:
    """A journal is written before anything that follows from it: what is beside it cannot be newer, unless it is an old
    copy. Raises JournalError."""
    newer = unknown_to(history.snapshots, history.dropped, path / SNAPSHOTS, identity)
    if newer is not None:
        raise JournalError(path / JOURNAL, f"is older than {newer}, which the journal does not know", "outdated")
    seen = last_in_metrics(path)
    if seen > (history.lineage, history.step):
        raise JournalError(
            path / JOURNAL,
            f"is older than {path / METRICS}: the journal ends with step {history.step} of lineage {history.lineage}, "
            f"the metrics with step {seen[1]} of lineage {seen[0]}",
            "outdated",
        )


def believe(path: Path, identity: RunIdentity) -> tuple[History, float]:
    """The history of a run's directory and when it was last written to, without touching it. Raises JournalError."""
    history, at = read(path / JOURNAL, identity)
    check_beside(path, identity, history)
    return history, at


def last_in_metrics(path: Path) -> tuple[int, int]:
    """Lineage and step of the last row that can be read."""
    try:
        row = last_step(path / METRICS)
    except FileNotFoundError:
        return 0, 0
    return (0, 0) if row is None else (row["lineage"], row["step"])
