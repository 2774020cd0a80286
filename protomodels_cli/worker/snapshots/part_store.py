"""A peer's parts of snapshots on its disk: written whole or not at all, checked before use, kept until told to go.

Knows files and hashes. It must not know the coordinator, nor which snapshots are needed: it is told.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from protomodels_cli.files import hash_file, put_in_place
from protomodels_cli.protocol.parts import Part

# The hash is in the name: a file with that name was whole once.
NAME = re.compile(r"(\d{4,})-(\d{8,})-stage-(\d+)\.([0-9a-f]{64})\.safetensors")


class PartStore:
    """One folder of one run's parts. It must not know where they come from or go to."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.partial"):
            if not _runs(left.name.split(".")[-2]):  # another peer of this run may have the same folder
                left.unlink(missing_ok=True)

    def all(self) -> list[Part]:
        """The parts that are here; none where the folder cannot be read."""
        try:
            found = [NAME.fullmatch(path.name) for path in sorted(self.folder.iterdir())]
        except OSError:
            return []
        return [Part(int(m[1]), int(m[2]), int(m[3]), m[4]) for m in found if m]

    def path(self, part: Part) -> Path:
        name = f"{part.lineage:04d}-{part.step:08d}-stage-{part.stage}.{part.sha256}.safetensors"
        return self.folder / name

    def fetching(self, part: Part) -> Path:
        """Where a part that is being fetched is put together."""
        return self.path(part).with_suffix(f".safetensors.{os.getpid()}.partial")

    def write(self, lineage: int, step: int, stage: int, state: dict[str, Tensor]) -> Part:
        """Write a stage's part. Raises OSError, and then leaves nothing behind."""
        work = self.folder / f"{lineage}-{step}-{stage}.{os.getpid()}.partial"
        try:
            save_file(state, work)
            part = Part(lineage, step, stage, hash_file(work))
            self.put(work, part)
        except (OSError, SafetensorError) as e:
            work.unlink(missing_ok=True)
            raise OSError(getattr(e, "strerror", None) or str(e)) from None
        return part

    def put(self, work: Path, part: Part) -> None:
        """Give a complete file the name of its part, on disk for good."""
        put_in_place(work, self.path(part))

    def is_whole(self, part: Part) -> bool:
        """Whether the part is here with the hash in its name; not, if it cannot be read."""
        try:
            return hash_file(self.path(part)) == part.sha256
        except OSError:
            return False

    def remove(self, part: Part) -> None:
        """Delete what there is of a part. What cannot be deleted is checked before it is used, like any other."""
        for path in (self.path(part), self.fetching(part)):
            with contextlib.suppress(OSError):
                path.unlink()

    def keep(self, snapshots: Collection[tuple[int, int]]) -> None:
        """Delete the parts of all other snapshots, and what was fetched of them. Raises OSError."""
        for path in self.folder.iterdir():
            found = NAME.match(path.name)
            if found is None or path.name[found.end() :] not in ("", f".{os.getpid()}.partial"):
                continue  # another peer's
            if (int(found[1]), int(found[2])) not in snapshots:
                path.unlink(missing_ok=True)


def _runs(pid: str) -> bool:
    """Whether another process has this number. This process is new: what has its number was left by one before."""
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
