"""A new journal, from the newest complete snapshot, in place of one that cannot be trusted.

Nothing is deleted here. What the new journal does not know is moved to a folder of its own, for the owner to look into.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from protomodels_cli.coordinator import rebuild_notices as notices
from protomodels_cli.coordinator.file_names import BASES, JOURNAL, SNAPSHOTS
from protomodels_cli.coordinator.history import History, Mark, back_to_newest
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.journal import JournalError, create
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.coordinator.snapshots.manifest import MANIFEST, Manifest, bases_of, basis_name
from protomodels_cli.coordinator.snapshots.store import NAMED, set_aside
from protomodels_cli.coordinator.trust import believe, last_in_metrics
from protomodels_cli.errors import UserError
from protomodels_cli.files import hash_file, sync_folder, write_whole

ASIDE = re.compile(r"set-aside-(\d+)")
# Peers may know later lineages and generations than anything on disk here tells of. Far fewer than these.
LINEAGES, GENERATIONS = 1000, 1000  # skipped; of the latter, for each lineage


def rebuild(
    path: Path, identity: RunIdentity, beginning: History, tell: Callable[[notices.AboutRebuilding], None]
) -> None:
    """Make a new journal; the old one is moved aside. `beginning`: the history before any record."""
    try:
        step = believe(path, identity)[0].step
    except JournalError as e:
        tell(notices.JournalRefused(str(e).splitlines()[0]))
    else:
        raise UserError(
            f"nothing to rebuild: {path / JOURNAL} is complete, up to step {step}",
            f"continue with `pmtrain coordinator --resume --dir {path}`",
            kind="nothing_to_rebuild",
        )
    whole, unusable = _look(path / SNAPSHOTS, identity)
    for folder, why in unusable.items():
        if NAMED.fullmatch(folder.name):
            tell(notices.SnapshotSetAside(folder.name, why))
    lineage = LINEAGES + _highest_lineage(path)
    aside = _set_aside(path, lineage, list(unusable))
    _bring_back_bases(path, whole)
    history = history_from(beginning, [m.mark for m in whole], lineage, last_in_metrics(path)[1])
    create(path / JOURNAL, identity, history, time.time())
    lost = max(0, last_in_metrics(path)[1] - history.step)
    tell(notices.JournalRebuilt(history.step, lost, str(aside)))


def _look(folder: Path, identity: RunIdentity) -> tuple[list[Manifest], dict[Path, str]]:
    """The whole snapshots, oldest first, each of a later step than the one before; and why the others are none."""
    whole: list[Manifest] = []
    unusable: dict[Path, str] = {}
    for path in folder.glob(f".*/{MANIFEST}"):  # all that a kill kept it from is its name
        named = folder / path.parent.name[1:]
        if not named.exists():
            os.rename(path.parent, named)
    found = {path: m for path in folder.iterdir() if (m := NAMED.fullmatch(path.name))} if folder.is_dir() else {}
    for path in sorted(found, key=lambda p: (int(found[p][1]), int(found[p][2])), reverse=True):
        try:
            one = manifest.check(path, identity)
            if whole and one.mark.step >= whole[0].mark.step:
                raise ValueError(f"a later lineage saved step {whole[0].mark.step} already")
            whole.insert(0, one)
        except ValueError as e:
            unusable[path] = str(e)
    begun = [path for path in folder.iterdir() if path not in found] if folder.is_dir() else []
    return whole, unusable | dict.fromkeys(begun, "the snapshot was not complete")


def _highest_lineage(path: Path) -> int:
    named = [NAMED.fullmatch(p.name.lstrip(".")) for p in (path / SNAPSHOTS).glob("*")]
    aside = [ASIDE.fullmatch(p.name) for p in path.iterdir()]
    return max([1, last_in_metrics(path)[0], *(int(m[1]) for m in (*named, *aside) if m)])


def _set_aside(path: Path, lineage: int, unusable: list[Path]) -> Path:
    aside = set_aside(path, lineage, unusable)
    aside.mkdir(exist_ok=True)
    for name in (JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm"):  # the log after what it belongs to
        if (path / name).exists():
            os.rename(path / name, aside / name)
    for folder in (aside, path / SNAPSHOTS, path):
        if folder.is_dir():
            sync_folder(folder)
    return aside


def _bring_back_bases(path: Path, whole: list[Manifest]) -> None:
    """Every snapshot has those that it needs."""
    for one in whole:
        folder = path / SNAPSHOTS / manifest.folder_name(*one.mark.key)
        for name in map(basis_name, bases_of(one.mark)):
            here = path / BASES / name
            if not here.exists() or hash_file(here) != one.files[name].sha256:
                here.parent.mkdir(exist_ok=True)
                write_whole(here, (folder / name).read_bytes())


def history_from(beginning: History, marks: list[Mark], lineage: int, seen: int) -> History:
    """As after going back to the newest of these snapshots, in a lineage that is new to every peer: what peers have in
    memory does not count. `seen`: the last step that was decided, as far as we know."""
    first = [] if marks and marks[0].key == beginning.newest.key else [beginning.newest]  # it may have been cut
    snapshots = *first, *marks
    newest = snapshots[-1]
    before = replace(
        beginning,
        snapshots=snapshots,
        generation=newest.generation + (lineage - newest.lineage) * GENERATIONS,
        layers=newest.layers,
        step=max(seen, newest.step),
        rollbacks=newest.rollbacks,
        redone=newest.redone,
        answered=newest.answered,
        paused=newest.paused,
    )
    return back_to_newest(before, lineage)
