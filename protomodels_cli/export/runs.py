"""The runs that can be exported: a coordinator's, the reference's, and a store's copy. What each has saved, and where.

Reads only, without a lock: a coordinator may be at work in the directory, and may drop any snapshot at any moment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import yaml

from protomodels_cli.coordinator.file_names import METRICS, PRIVATE, SNAPSHOTS
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.identity import RunIdentity, WrongIdentity
from protomodels_cli.coordinator.run_dir import private_of, run_of
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.coordinator.snapshots.copies import SPEC
from protomodels_cli.coordinator.snapshots.manifest import MANIFEST, part_name, stored_mark, stored_name
from protomodels_cli.coordinator.snapshots.store import NAMED
from protomodels_cli.errors import UserError
from protomodels_cli.export.shelves import Folder, Shelf, shelf_at
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec

Key = tuple[int, int]  # lineage, 0 for the reference's, and step
RUN, HASHES = "run.yaml", "hashes.json"


class NotUsable(ValueError):
    """Why a snapshot cannot be read, with the name of the file."""

    def __init__(self, file: str, why: str):
        super().__init__(f"{file} {why}")


@dataclass(frozen=True)
class Located:
    """A part, and where it lies."""

    shelf: Shelf
    path: str
    sha256: str


@dataclass(frozen=True)
class Described:
    """A complete snapshot as it describes itself."""

    layers: tuple[int, ...]
    parts: tuple[Located, ...]  # one per stage
    mark: Mark | None = None


class Run(Protocol):
    shelf: Shelf
    spec: RunSpec
    base: Path | None  # what the spec's paths are relative to, where that is this machine
    metrics: Path | None

    def saved(self) -> list[Key]:
        """The complete snapshots, the newest first."""
        ...

    def describe(self, key: Key) -> Described:
        """Raises FileNotFoundError where it is gone, and NotUsable."""
        ...


class PipelineRun:
    """A coordinator's, by its directory or by its copy in a store."""

    def __init__(
        self, shelf: Shelf, spec: RunSpec, run: str | None, base: Path | None, at: str, scratch: Path | None = None
    ):
        """`run`: its fingerprint, where that is known; `at`: where the snapshots lie on the shelf. `scratch`: where the
        temporary files of a store lie."""
        self._scratch = scratch
        self.shelf, self.spec, self.base, self._run, self._at = shelf, spec, base, run, at
        self.metrics = shelf.path / METRICS if base is not None and isinstance(shelf, Folder) else None

    def saved(self) -> list[Key]:
        try:
            names = self.shelf.names(self._at)
        except FileNotFoundError:
            return []
        found = [m for name in names if (m := NAMED.fullmatch(name)) and self.shelf.exists(self._path(name, MANIFEST))]
        return sorted(((int(m[1]), int(m[2])) for m in found), reverse=True)

    def describe(self, key: Key) -> Described:
        folder = manifest.folder_name(*key)
        file = self._path(folder, MANIFEST)
        content = _read(self.shelf, file)
        try:
            found = manifest.parse(content)
            found.identity.check(RunIdentity(self._run or found.identity.run, self.spec.sha256()))
        except WrongIdentity as e:
            raise NotUsable(file, str(e)) from None
        except ValueError:
            raise NotUsable(file, "is damaged") from None
        mark = found.mark
        if mark.key != key or not mark.parts or len(mark.layers) != len(mark.parts):
            raise NotUsable(file, "describes another snapshot")
        parts = tuple(self._locate(folder, stage, sha256) for stage, sha256 in enumerate(mark.parts))
        return Described(mark.layers, parts, mark)

    def _locate(self, folder: str, stage: int, sha256: str) -> Located:
        """On the shelf, where its peer may have put it itself; or in the store alone."""
        plain, own = self._path(folder, part_name(stage)), stored_name(stage, sha256)
        if self.shelf.exists(plain):
            return Located(self.shelf, plain, sha256)
        if self.shelf.exists(self._path(folder, own)):
            return Located(self.shelf, self._path(folder, own), sha256)
        url = self.spec.snapshots.copy_to
        if url and self._run and self.shelf.exists(self._path(folder, stored_mark(Path(), stage, sha256).name)):
            there = f"{url.rstrip('/')}/{RunIdentity(self._run, '').name_in_store(self.spec.name)}"
            return Located(shelf_at(there, self._scratch), f"{folder}/{own}", sha256)
        return Located(self.shelf, plain, sha256)  # it is missing

    def _path(self, *parts: str) -> str:
        return "/".join((self._at, *parts) if self._at else parts)


class ReferenceRun:
    """Of `pmtrain reference`."""

    def __init__(self, path: Path):
        self.shelf: Shelf = Folder(path)
        self.spec = _spec_in(path / RUN)
        self.base: Path | None = path
        self.metrics: Path | None = path / METRICS

    def saved(self) -> list[Key]:
        try:
            names = self.shelf.names(SNAPSHOTS)
        except FileNotFoundError:
            return []
        return sorted(((0, int(name)) for name in names if name.isdigit()), reverse=True)

    def describe(self, key: Key) -> Described:
        folder = f"{SNAPSHOTS}/{key[1]:08d}"
        layers = tuple(layers_per_stage(self.spec))
        content = _read(self.shelf, f"{folder}/{HASHES}")
        try:
            hashes: Any = json.loads(content)["sha256"]
            names = [part_name(i) for i in range(len(layers))]
            parts = tuple(Located(self.shelf, f"{folder}/{name}", str(hashes[name])) for name in names)
        except (ValueError, TypeError, KeyError):
            raise NotUsable(f"{folder}/{HASHES}", "is damaged") from None
        return Described(layers, parts)


def _spec_in(path: Path) -> RunSpec:
    """As it ran: the files that it names need not be there any more."""
    try:
        return spec_from(yaml.safe_load(path.read_bytes()))
    except yaml.YAMLError:
        raise UserError(
            f"{path} is damaged: it is not YAML", f"restore {path} from a copy", "run_dir_damaged"
        ) from None


def _read(shelf: Shelf, file: str) -> bytes:
    try:
        return shelf.read(file)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise NotUsable(file, f"cannot be read: {e.strerror}") from None


def run_at(place: str, scratch: Path | None = None) -> tuple[Run, Key | None]:
    """The run, and the one snapshot of it that the place names, if it does. Raises UserError."""
    shelf = shelf_at(place, scratch)
    if isinstance(shelf, Folder):
        if (shelf.path / PRIVATE).exists():
            spec, identity = run_of(shelf.path)
            return PipelineRun(shelf, spec, identity.run, Path(private_of(shelf.path).base), SNAPSHOTS, scratch), None
        if (shelf.path / RUN).exists():
            return ReferenceRun(shelf.path), None
    above, _, name = place.rstrip("/").rpartition("/")
    if named := NAMED.fullmatch(name):
        stored = _stored(shelf_at(above or ".", scratch))
        return (stored, (int(named[1]), int(named[2]))) if stored else _no_run(place)
    if stored := _stored(shelf):
        return stored, None
    try:
        below = sorted(name for name in shelf.names() if shelf.exists(f"{name}/{SPEC}"))
    except (FileNotFoundError, NotADirectoryError):
        below = []
    if len(below) > 1:
        names = ", ".join(below)
        fix = f"name one of them, for example {place.rstrip('/')}/{below[-1]}"
        raise UserError(f"{place} holds copies of {len(below)} runs: {names}", fix, "several_runs")
    stored = _stored(shelf_at(f"{place.rstrip('/')}/{below[0]}", scratch)) if below else None
    return (stored, None) if stored else _no_run(place)


def _no_run(place: str) -> NoReturn:
    raise UserError(
        f"{place} is not a run directory",
        "name the directory of a run, or the store that snapshots.copy_to of a run names",
        "not_a_run_dir",
    )


def _stored(shelf: Shelf) -> PipelineRun | None:
    """The run whose copy this place of a store is."""
    try:
        content = shelf.read(SPEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        spec = spec_from(json.loads(content))
    except (ValueError, UserError):
        what, fix = f"{shelf.place}/{SPEC} is damaged", "export from the run directory"
        raise UserError(what, fix, "store_damaged") from None
    return PipelineRun(shelf, spec, None, None, "")
