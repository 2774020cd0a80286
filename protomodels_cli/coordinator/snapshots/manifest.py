"""A snapshot's description of itself: snapshot.json, beside the parts, enough to continue from without a journal.

Knows the files of one snapshot. Which of several is used, and how the run continues, is decided elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from protomodels_cli.coordinator.as_json import as_json, from_json
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.identity import RunIdentity, WrongIdentity
from protomodels_cli.files import hash_file, write_whole

MANIFEST = "snapshot.json"
STORED = ".stored"
PUT_THERE = re.compile(r"stage-\d+\.[0-9a-f]{64}\.safetensors")  # see stored_name


@dataclass(frozen=True)
class File:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    identity: RunIdentity
    mark: Mark  # lineage, step, basis and the hashes of all parts among it
    t_fixed: tuple[int, str]  # version and hash
    files: dict[str, File]  # the parts, and the bytes of the bases but the first


def part_name(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def stored_name(stage: int, sha256: str) -> str:
    """Of a part in the store, where its peer has put it there. Other bytes never get this name (direct.py)."""
    return f"stage-{stage}.{sha256}.safetensors"


def stored_mark(folder: Path, stage: int, sha256: str) -> Path:
    """What lies here in place of such a part: a file with its size."""
    return folder / f"stage-{stage}.{sha256}{STORED}"


def basis_name(version: int) -> str:
    return f"{version:06d}.u"


def bases_of(mark: Mark) -> list[int]:
    """Versions of the bases that a run needs to continue from here, without the first, which every run has."""
    versions = [mark.basis_version, *([] if mark.next_basis is None else [mark.next_basis.version])]
    return [version for version in versions if version > 0]


def write(folder: Path, identity: RunIdentity, mark: Mark, t_fixed: tuple[int, str], bases: Path) -> None:
    """Write the manifest beside the parts, and after them: a folder with a manifest was complete once. A file that
    somebody has removed is not listed."""
    files = dict[str, File]()
    for stage, sha256 in enumerate(mark.parts):
        if (found := _part(folder, stage, sha256)) is not None:
            files[part_name(stage)] = found
    for name in map(basis_name, bases_of(mark)):
        if (bases / name).exists():
            write_whole(folder / name, (bases / name).read_bytes())
            files[name] = File((folder / name).stat().st_size, hash_file(folder / name))
    write_whole(folder / MANIFEST, as_json(Manifest(identity, mark, t_fixed, files), indent=1))


def _part(folder: Path, stage: int, sha256: str) -> File | None:
    """That should be this one: here, or in the store."""
    if (here := folder / part_name(stage)).exists():
        return File(here.stat().st_size, sha256)
    stored = stored_mark(folder, stage, sha256)
    return File(int(stored.read_text()), sha256) if stored.exists() else None


def read(folder: Path) -> Manifest:
    """Raises ValueError with the reason in words."""
    try:
        return parse((folder / MANIFEST).read_bytes())
    except OSError as e:
        raise ValueError(f"{MANIFEST} cannot be read ({e.strerror})") from None


def parse(content: bytes) -> Manifest:
    """Raises ValueError with the reason in words."""
    try:
        return from_json(Manifest, content)
    except ValidationError as e:
        raise ValueError(f"{MANIFEST} is damaged ({e.errors()[0]['msg']})") from None


def check(folder: Path, right: RunIdentity) -> Manifest:
    """All of it: that it is this run's, and that every file has the right bytes. A part that lies in
    the store counts as whole: whoever fetches it looks at its bytes. Raises ValueError with the reason."""
    manifest = read(folder)
    try:
        manifest.identity.check(right)
    except WrongIdentity as e:
        raise ValueError(f"the snapshot {e}") from None
    mark = manifest.mark
    if folder.name != folder_name(*mark.key) or not mark.parts or len(mark.layers) != len(mark.parts):
        raise ValueError(f"{MANIFEST} describes another snapshot")
    parts = [(folder / part_name(stage), stored_mark(folder, stage, sha)) for stage, sha in enumerate(mark.parts)]
    in_store = {here.name for here, stored in parts if stored.exists() and not here.exists()}
    for name in [*map(part_name, range(len(mark.parts))), *map(basis_name, bases_of(mark))]:
        if name in in_store:
            continue
        try:
            found = File((folder / name).stat().st_size, hash_file(folder / name))
        except OSError as e:
            raise ValueError(f"{name} cannot be read ({e.strerror})") from None
        if found != manifest.files.get(name):
            raise ValueError(f"{name} is damaged (hash mismatch)")
    return manifest


def folder_name(lineage: int, step: int) -> str:
    return f"{lineage:04d}-{step:08d}"
