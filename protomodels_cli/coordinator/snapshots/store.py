"""The files of snapshots at the coordinator: parts arrive in pieces; a snapshot is complete once all parts are.

snapshots/LINEAGE-STEP/stage-I.safetensors, VERSION.u, snapshot.json     a complete one, which describes itself
snapshots/.LINEAGE-STEP/stage-I.HASH.safetensors[.partial]               one that is being uploaded
snapshots/[.]LINEAGE-STEP/stage-I.HASH.stored                            in place of a part that lies in the store alone
snapshots/[.]LINEAGE-STEP.dropped/                                       one that is being deleted
set-aside-LINEAGE/snapshots/                                             what is unusable, for the owner to look into
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from protomodels_cli.coordinator.history import Dropped, History, Mark
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.coordinator.snapshots.manifest import folder_name, part_name
from protomodels_cli.files import hash_file, put_in_place, sync_folder, write_whole
from protomodels_cli.retry import Backoff, retry

T = TypeVar("T")

NAMED = re.compile(r"(\d{4,})-(\d{8,})")
DROPPED = ".dropped"
NOT_THERE = FileNotFoundError, IsADirectoryError, NotADirectoryError
READ_TRIES, READ_AGAIN = 10, 2.0  # to read a file, and seconds between two
ARRIVED = re.compile(r"stage-(\d+)\.([0-9a-f]{64})\.(?:safetensors|stored)")


class Snapshots:
    def __init__(self, folder: Path, identity: RunIdentity, t_fixed: tuple[int, str], bases: Path):
        """`t_fixed`: its version and hash; `bases`: the folder with the bytes of every basis in use."""
        self._folder, self._identity, self._t_fixed, self._bases = folder, identity, t_fixed, bases
        folder.mkdir(exist_ok=True)
        self._one_at_a_time = threading.Lock()
        self._read: set[Path] = set()  # folders that somebody reads: they stay until that is done

    def _begun(self, lineage: int, step: int) -> Path:
        return self._folder / f".{folder_name(lineage, step)}"

    def _named(self, mark: Mark) -> Path:
        return self._folder / folder_name(*mark.key)

    def partial(self, lineage: int, step: int, stage: int, sha256: str) -> Path:
        """Where a part is put together; what is there of it already is its beginning."""
        return self._begun(lineage, step) / f"stage-{stage}.{sha256}.safetensors.partial"

    # What follows blocks: it is for threads.

    def coming(self, lineage: int, step: int, stage: int, sha256: str) -> Path:
        """The same, in a folder that is there, and without what was begun with other bytes."""
        path = self.partial(lineage, step, stage, sha256)
        path.parent.mkdir(exist_ok=True)
        for other in path.parent.glob(f"stage-{stage}.*.partial"):
            if sha256 not in other.name:
                other.unlink(missing_ok=True)
        return path

    def needed_from(self, lineage: int, step: int, stage: int, sha256: str) -> int | None:
        """The byte from which on this part has still to come; None: it has arrived."""
        if self.has(lineage, step, stage):
            return None
        try:
            return self.coming(lineage, step, stage, sha256).stat().st_size
        except FileNotFoundError:
            return 0

    def begin_anew(self, lineage: int, step: int) -> Path:
        """An empty folder for one whose parts are made here."""
        self.drop(lineage, step)
        folder = self._begun(lineage, step)
        folder.mkdir()
        return folder

    def drop(self, lineage: int, step: int) -> None:
        """Delete the parts that have arrived of a snapshot that was begun and given up."""
        shutil.rmtree(self._begun(lineage, step), ignore_errors=True)

    def arrived(self, path: Path) -> None:
        """This part is whole, and on disk."""
        os.replace(path, path.with_suffix(""))
        sync_folder(path.parent)

    def arrived_in_store(self, lineage: int, step: int, stage: int, sha256: str, size: int) -> None:
        """This part is whole, and in the store. Raises FileNotFoundError where its snapshot was given up."""
        folder = self._begun(lineage, step)
        write_whole(manifest.stored_mark(folder, stage, sha256), str(size).encode())

    def is_in_store(self, mark: Mark, stage: int) -> bool:
        """Did its peer put this part of a complete one there?"""
        folders = self._begun(*mark.key), self._named(mark)
        return any(manifest.stored_mark(folder, stage, mark.parts[stage]).exists() for folder in folders)

    def has(self, lineage: int, step: int, stage: int) -> bool:
        return stage in self.here(lineage, step)

    def here(self, lineage: int, step: int) -> dict[int, str]:
        """The parts that have arrived of a snapshot that was begun: stage → hash."""
        folder = self._begun(lineage, step)
        found = [ARRIVED.fullmatch(path.name) for path in folder.iterdir()] if folder.exists() else []
        return {int(m[1]): m[2] for m in found if m}

    def settle(self, history: Callable[[], History]) -> None:
        """Give the complete ones their names, delete those that the journal says it needs no longer, and set the
        unusable ones aside. What it does not know stays: it may be the better one of the two."""
        with self._one_at_a_time:
            for mark in history().snapshots:
                if mark.parts and not self._named(mark).exists():
                    self._complete(mark)
            for rest in self._folder.glob(f"*{DROPPED}"):
                shutil.rmtree(rest, ignore_errors=True)
            here = {path.name for path in self._folder.iterdir()}
            for old in history().dropped:
                name = folder_name(*old.key)
                for gone in sorted(here & ({name, f".{name}"} if old.complete else {f".{name}"})):
                    self._remove(self._folder / gone, old, history)

    def _remove(self, folder: Path, old: Dropped, history: Callable[[], History]) -> None:
        """In two steps, of which the first takes no time: one that was given up may be begun again at any moment."""
        if folder in self._read or old not in history().dropped:
            return
        if old.unusable:
            set_aside(self._folder.parent, old.lineage, [folder])
            return
        doomed = folder.with_name(folder.name + DROPPED)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[bool]:
        """Is it there? Then it stays there meanwhile, also when it is dropped."""
        with self._one_at_a_time:
            here = folder.exists()
            self._read.add(folder)
        try:
            yield here
        finally:
            with self._one_at_a_time:
                self._read.discard(folder)

    def _complete(self, mark: Mark) -> None:
        work = self._begun(*mark.key)
        if not work.exists():
            return  # somebody removed it; whoever needs it will find out, and say so
        for stage, sha256 in enumerate(mark.parts):
            came = work / f"stage-{stage}.{sha256}.safetensors"
            if came.exists():
                os.replace(came, work / part_name(stage))
        manifest.write(work, self._identity, mark, self._t_fixed, self._bases)
        os.rename(work, self._named(mark))
        sync_folder(self._folder)

    def folders(self, complete: Collection[Mark]) -> list[Path]:
        """Where they are, once they have their names."""
        return [self._named(m) for m in complete if m.parts]

    def is_whole(self, mark: Mark, stage: int) -> bool:
        """Does this part of a complete one have the right bytes? Raises OSError where it is there and cannot be read:
        that may pass."""
        file = self.open_part(mark, stage)
        if file is None:
            return False
        with file:
            return hashlib.file_digest(file, "sha256").hexdigest() == mark.parts[stage]

    def replace_part(self, mark: Mark, stage: int, get: Callable[[str, str, Path], None]) -> bool:
        """With what `get` finds under the names of the snapshot and of the file, if that has the right bytes. Raises
        what that raises."""
        folder = self._named(mark)
        part = folder / part_name(stage)
        work = part.with_suffix(f".{secrets.token_hex(4)}.partial")  # one that hangs may write long after this
        folder.mkdir(exist_ok=True)
        try:
            get(folder.name, part.name, work)
            if hash_file(work) != mark.parts[stage]:
                return False
            put_in_place(work, part)
            manifest.write(folder, self._identity, mark, self._t_fixed, self._bases)
            return True
        finally:
            work.unlink(missing_ok=True)

    def open_part(self, mark: Mark, stage: int) -> BufferedReader | None:
        """A part of a complete snapshot. It is looked for under all its names: the folder and its files may be being
        renamed at this moment (see _complete)."""
        begun, plain = self._begun(*mark.key), part_name(stage)
        ways = (
            begun / f"stage-{stage}.{mark.parts[stage]}.safetensors",
            begun / plain,
            self._named(mark) / plain,
        )
        for path in ways:
            with contextlib.suppress(*NOT_THERE):
                return path.open("rb")
        return None


async def patiently(read: Callable[..., T], *arguments: Any) -> T:
    """Do it in a thread. What is missing is missing; any other failure of the disk may pass, and is waited out."""

    def unless_missing(error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            raise error

    backoff = Backoff(READ_AGAIN, jitter=0, most_tries=READ_TRIES)
    return await retry(lambda: asyncio.to_thread(read, *arguments), backoff, OSError, unless_missing)


def set_aside(run_dir: Path, lineage: int, snapshots: Collection[Path]) -> Path:
    """Move these folders of snapshots to where nothing is ever deleted. Returns the folder of this lineage."""
    aside = run_dir / f"set-aside-{lineage}"
    for folder in snapshots:
        to = aside / folder.parent.name / folder.name
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            os.rename(folder, to)
            sync_folder(to.parent)
    return aside


def unknown_to(complete: Collection[Mark], dropped: Collection[Dropped], folder: Path, run: RunIdentity) -> Path | None:
    """A snapshot of this run that is newer than any that a journal with these has ever had: then that is too old."""
    known = {mark.key for mark in complete} | {d.key for d in dropped if d.complete}
    found = [(int(m[1]), int(m[2])) for path in _listed(folder) if (m := NAMED.fullmatch(path.name))]
    for key in sorted(found, reverse=True):
        if key > max(known, default=(0, 0)):
            path = folder / folder_name(*key)
            with contextlib.suppress(ValueError):
                if manifest.read(path).identity.run != run.run:
                    continue  # another run's, which somebody put here
            return path
    return None


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
