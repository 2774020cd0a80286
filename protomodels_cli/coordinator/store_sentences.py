"""How notices of copies, of the store and of a journal that is made anew read. See sentences.py."""

from __future__ import annotations

from typing import assert_never

from protomodels_cli.coordinator import notices as n
from protomodels_cli.coordinator import rebuild_notices as rebuilding
from protomodels_cli.quantities import plural


def about_store(notice: n.AboutStore) -> str:
    match notice:
        case n.StoreKeyMade(file, url):
            return (
                f"made the key {file}: keep a copy of it away from this machine. If this machine is lost, `pmtrain "
                f"coordinator --from {url} --key FILE` continues the run on another, and without the key nothing does"
            )
        case n.StoreNotDirect(url, detail):
            return f"peers cannot use {url} themselves: {detail}; all parts go through the coordinator"
        case n.JournalNotCopied(url, detail):
            return f"could not copy the journal to {url}: {detail}; retrying"
        case n.StoredUnusable(name, detail):
            return f"not using {name}: {detail}"
        case n.TookOver(url, step, snapshot, in_memory):
            newest = f"the snapshot at step {snapshot}" if snapshot else "the beginning"
            if in_memory:
                return f"taking over from {url} after step {step}; where a stage is not in memory, from {newest}"
            return f"taking over from {url}: from {newest}, since no journal there is newer"
        case _:
            assert_never(notice)


def about_copies(notice: n.AboutCopies) -> str:
    match notice:
        case n.CopyFailed(url, detail):
            return f"could not copy all snapshots to {url}: {detail}; retrying after the next snapshot"
        case n.CopyingLast(url):
            return f"copying the last snapshot to {url} … (Ctrl-C leaves without the copy)"
        case n.CopyAbandoned():
            return "interrupted: the last snapshot is not copied"
        case n.CopyUnreachable(stage, step, url, detail):
            return f"{part_of(stage, step)} has to come from {url}, which cannot be reached: {detail}; waiting for it"
        case n.PartRestored(stage, step, url):
            return f"restored {part_of(stage, step)}, which was damaged, from {url}"
        case n.PartDamaged(stage, step, url):
            return f"{part_of(stage, step)} is damaged, and missing or damaged at {url} too"
        case _:
            assert_never(notice)


def about_rebuilding(notice: rebuilding.AboutRebuilding) -> str:
    match notice:
        case rebuilding.JournalRefused(detail):
            return detail
        case rebuilding.SnapshotSetAside(snapshot, detail):
            return f"set aside the snapshot {snapshot}, which cannot be used: {detail}"
        case rebuilding.JournalRebuilt(step, lost, aside):
            start = f"the snapshot at step {step}" if step else "the beginning, without a complete snapshot"
            redo = f"{plural(lost, 'step')} to redo" if lost else "nothing to redo"
            return f"made a new journal from {start}, {redo}; a paused run continues; the old journal is in {aside}"
        case _:
            assert_never(notice)


def part_of(stage: int, step: int) -> str:
    return f"stage {stage}'s part of the snapshot at step {step}"
