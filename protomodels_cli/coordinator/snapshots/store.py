"""Snapshots at the coordinator: parts come in piece by piece, and count once all of them are whole.

snapshots/LINEAGE-STEP/stage-I.safetensors, hashes.json          a complete one
snapshots/.LINEAGE-STEP/stage-I.HASH.safetensors[.partial]       one that is being handed in
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from io import BufferedReader
from pathlib import Path

from protomodels_cli.coordinator.history import Mark
from protomodels_cli.files import hash_file, sync_folder, write_whole

HASHES = "hashes.json"
ARRIVED = re.compile(r"stage-(\d+)\.([0-9a-f]{64})\.safetensors")


class Snapshots:
    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(exist_ok=True)

    @staticmethod
    def _name(lineage: int, step: int) -> str:
        return f"{lineage:04d}-{step:08d}"

    def _begun(self, lineage: int, step: int) -> Path:
        return self._folder / f".{self._name(lineage, step)}"

    def coming(self, lineage: int, step: int, stage: int, sha256: str) -> Path:
        """Where a part is put together; what is there of it already is its beginning."""
        folder = self._begun(lineage, step)
        folder.mkdir(exist_ok=True)
        for other in folder.glob(f"stage-{stage}.*.partial"):
            if sha256 not in other.name:
                other.unlink()
        return folder / f"stage-{stage}.{sha256}.safetensors.partial"

    def drop(self, lineage: int, step: int) -> None:
        """What there is of one that was begun."""
        shutil.rmtree(self._begun(lineage, step), ignore_errors=True)

    def arrived(self, path: Path) -> None:
        """This part is whole, and on disk."""
        os.replace(path, path.with_suffix(""))
        sync_folder(path.parent)

    def has(self, lineage: int, step: int, stage: int) -> bool:
        return stage in self._arrived(lineage, step)

    def _arrived(self, lineage: int, step: int) -> dict[int, str]:
        folder = self._begun(lineage, step)
        found = [ARRIVED.fullmatch(path.name) for path in folder.iterdir()] if folder.exists() else []
        return {int(m[1]): m[2] for m in found if m}

    def whole(self, lineage: int, step: int, stages: int) -> tuple[str, ...] | None:
        """The hashes of all parts, once all are here."""
        here = self._arrived(lineage, step)
        return tuple(here[i] for i in range(stages)) if len(here) == stages else None

    def found(self) -> list[Path]:
        """All there is, complete or not."""
        return list(self._folder.iterdir())

    def settle(self, complete: Collection[Mark], begun: Collection[Mark], found: Collection[Path]) -> None:
        """Give the complete ones their names; of what was found, delete whatever is neither complete nor begun."""
        for mark in complete:
            if mark.parts and not (self._folder / self._name(mark.lineage, mark.step)).exists():
                self._complete(mark)
        keep = {self._name(m.lineage, m.step) for m in complete} | {f".{self._name(m.lineage, m.step)}" for m in begun}
        for path in found:
            if path.name not in keep:
                shutil.rmtree(path, ignore_errors=True)

    def _complete(self, mark: Mark) -> None:
        work = self._begun(mark.lineage, mark.step)
        if not work.exists():
            return  # somebody removed it; whoever needs it will find out, and say so
        names = {}
        for stage, sha256 in enumerate(mark.parts):
            names[f"stage-{stage}.safetensors"] = sha256
            came = work / f"stage-{stage}.{sha256}.safetensors"
            if came.exists():
                os.replace(came, work / f"stage-{stage}.safetensors")
        write_whole(work / HASHES, json.dumps({"step": mark.step, "sha256": names}, indent=1).encode())
        os.rename(work, self._folder / self._name(mark.lineage, mark.step))
        sync_folder(self._folder)

    def folders(self, complete: Collection[Mark]) -> list[Path]:
        """Where they are, once they have their names."""
        return [self._folder / self._name(m.lineage, m.step) for m in complete if m.parts]

    def is_whole(self, mark: Mark, stage: int) -> bool:
        """Does this part of a complete one have the right bytes, as far as they can be read?"""
        try:
            file = self.open_part(mark, stage)
            if file is None:
                return False
            with file:
                return hashlib.file_digest(file, "sha256").hexdigest() == mark.parts[stage]
        except OSError:
            return False

    def replace_part(self, mark: Mark, stage: int, get: Callable[[str, str, Path], None]) -> bool:
        """With what `get` finds under the names of the snapshot and of the file, if that has the right bytes. Raises
        what that raises."""
        folder = self._folder / self._name(mark.lineage, mark.step)
        part = folder / f"stage-{stage}.safetensors"
        work = part.with_suffix(".partial")
        folder.mkdir(exist_ok=True)
        try:
            get(folder.name, part.name, work)
            if hash_file(work) != mark.parts[stage]:
                return False
            with work.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(work, part)
            sync_folder(folder)
            return True
        finally:
            work.unlink(missing_ok=True)

    def open_part(self, mark: Mark, stage: int) -> BufferedReader | None:
        """Of a complete one, which may be given its name just now."""
        begun, plain = self._begun(mark.lineage, mark.step), f"stage-{stage}.safetensors"
        ways = (
            begun / f"stage-{stage}.{mark.parts[stage]}.safetensors",
            begun / plain,
            self._folder / self._name(mark.lineage, mark.step) / plain,
        )
        for path in ways:
            with contextlib.suppress(FileNotFoundError):
                return path.open("rb")
        return None
