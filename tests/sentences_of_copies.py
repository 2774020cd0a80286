"""How notices of copies read, and what a run waits for that has them. See test_sentences.py."""

from __future__ import annotations

from protomodels_cli.coordinator import notices as n
from protomodels_cli.coordinator import reasons as r

OF_COPIES: list[tuple[n.Notice, str]] = [
    (
        n.CopyFailed("s3://b/run", "no route"),
        "could not copy all snapshots to s3://b/run: no route; retrying after the next snapshot",
    ),
    (
        n.CopyingLast("s3://b/run"),
        "copying the last snapshot to s3://b/run … (Ctrl-C leaves without the copy)",
    ),
    (n.CopyAbandoned(), "interrupted: the last snapshot is not copied"),
    (
        n.CopyUnreachable(1, 6, "s3://b/run", "no route"),
        "stage 1's part of the snapshot at step 6 has to come from s3://b/run, which cannot be reached: no route; "
        "waiting for it",
    ),
    (
        n.PartRestored(1, 6, "s3://b/run"),
        "restored stage 1's part of the snapshot at step 6, which was damaged, from s3://b/run",
    ),
    (
        n.PartDamaged(1, 6, "s3://b/run"),
        "stage 1's part of the snapshot at step 6 is damaged, and missing or damaged at s3://b/run too",
    ),
]

STORE_WAITS: list[tuple[r.Waiting, str]] = [
    (
        r.StoreUnreachable(1, 6, "s3://b", "no route"),
        "the store s3://b, which has stage 1's part of the snapshot at step 6: no route",
    ),
]
