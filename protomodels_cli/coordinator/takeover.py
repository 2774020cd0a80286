"""Continuing a run on another machine: a run directory, made from what the run's store has (deposit.py, copies.py).

The journal there is believed as one's own is after a restart, unless a snapshot beside it is newer: then a new one is
made from that snapshot, as `--rebuild` does. Either way lineages and generations skip whatever the lost coordinator may
have opened since: a stage in a peer's memory counts if it is exactly where the journal is, and never by mistake. All of
it blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.as_json import as_json
from protomodels_cli.coordinator.deposit import AUTHORITY, JOURNALS, JournalCopy, Papers, read_sealed, unsealed
from protomodels_cli.coordinator.file_names import BASES, JOURNAL, PRIVATE, SNAPSHOTS
from protomodels_cli.coordinator.history import Dropped, History, Mark, beginning
from protomodels_cli.coordinator.identity import RunIdentity, WrongIdentity
from protomodels_cli.coordinator.journal import create
from protomodels_cli.coordinator.rebuild import GENERATIONS, LINEAGES, history_from
from protomodels_cli.coordinator.seal import NotWhole, OtherKey, StoreKey, own_key
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.coordinator.snapshots.copies import SPEC, connect, in_words, names_in, taken_over
from protomodels_cli.coordinator.snapshots.manifest import (
    MANIFEST,
    Manifest,
    bases_of,
    basis_name,
    folder_name,
    part_name,
    stored_mark,
    stored_name,
)
from protomodels_cli.coordinator.snapshots.store import NAMED
from protomodels_cli.coordinator.subspace import Subspace, bases_needed
from protomodels_cli.data.kept import KEPT
from protomodels_cli.errors import UserError
from protomodels_cli.files import hash_file, put_in_place, write_whole
from protomodels_cli.quantities import size
from protomodels_cli.spec.load import spec_from, with_absolute_paths
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.join_link import Address
from protomodels_cli.wire.tls import InvalidPem, fingerprint_of

if TYPE_CHECKING:
    import fsspec

BEGUN = "taking-over"  # in a run directory that is not finished: from where it comes
Key = tuple[int, int]  # of a snapshot: lineage and step


class StoreError(UserError):
    """What is in the store, or not, that a run should be continued from."""


@dataclass(frozen=True)
class Stored:
    """A run in a store, whose secrets the key has opened."""

    files: fsspec.AbstractFileSystem
    root: str
    url: str
    papers: Papers
    spec: RunSpec
    key: StoreKey

    @property
    def identity(self) -> RunIdentity:
        return RunIdentity(fingerprint_of(self.papers.certificate.encode()), self.spec.sha256())

    def names(self) -> set[str]:
        return names_in(self.files, self.root)

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError, and whatever else the store raises."""
        return bytes(self.files.cat_file(f"{self.root}/{name}"))


@dataclass(frozen=True)
class Taken:
    """A run directory that can be opened now, and what there is to tell of it."""

    path: Path
    found: tuple[notices.Notice, ...]
    addresses: tuple[Address, ...]  # where peers look for the coordinator that is gone


def open_store(url: str, key: StoreKey) -> Stored:
    """The one run at this URL, or below it. Raises UserError."""
    try:
        files, root = connect(url)
        names = names_in(files, root)
        if not {AUTHORITY, SPEC} & names:
            below = sorted(n for n in names if {AUTHORITY, SPEC} & names_in(files, f"{root}/{n}"))
            if len(below) != 1:
                raise _no_run(url, below)
            root, url = f"{root}/{below[0]}", f"{url.rstrip('/')}/{below[0]}"
            names = names_in(files, root)
        sealed = files.cat_file(f"{root}/{AUTHORITY}") if AUTHORITY in names else None
    except UserError:
        raise
    except (ImportError, ValueError) as e:
        fix = "install the package for that kind of URL (s3fs for s3://), or check the URL"
        raise StoreError(f"cannot use {url}: {in_words(e)}", fix, kind="store_unknown") from None
    except Exception as e:  # a store may raise anything
        raise unreachable(url, e) from None
    if sealed is None:
        what = f"{url} has snapshots of a run and no {AUTHORITY}: its coordinator had no time to put it there"
        fix = "continue from the run directory; the weights can be exported with `pmtrain export`"
        raise StoreError(what, fix, kind="store_without_authority")
    try:
        papers = unsealed(key, Papers, sealed)
        fingerprint_of(papers.certificate.encode())
        return Stored(files, root, url, papers, spec_from(papers.private.spec), key)
    except OtherKey:
        what = f"the key does not open {url}/{AUTHORITY}: it is sealed under another one"
        fix = "name the store.key of this very run (--key FILE); every run has its own, unless its owner named one"
        raise StoreError(what, fix, kind="store_key_wrong") from None
    except (NotWhole, InvalidPem, UserError, ValueError) as e:
        what, fix = f"{url}/{AUTHORITY} is damaged ({in_words(e)})", f"restore {AUTHORITY} from a copy of the store"
        raise StoreError(what, fix, kind="store_damaged") from None


def take_over(stored: Stored, path: Path, base: Path | None, say: Callable[[str], None]) -> Taken:
    """Make a run directory of it in this folder, which is new, or was begun for this. `base`: what the spec's paths are
    relative to on this machine. Raises UserError."""
    _begin(path, stored)
    with (path / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fix = "wait for it, or choose another --dir"
            raise StoreError(f"another process takes over into {path}", fix, kind="run_dir_in_use") from None
        try:
            return _fetch(stored, path, base, say)
        except UserError:
            raise
        except OSError as e:
            if e.filename is not None and str(e.filename).startswith(str(path)):
                fix = "free space there or choose another --dir, and run the same command again"
                raise StoreError(f"cannot write to {path}: {e.strerror}", fix, kind="run_dir_not_writable") from None
            raise unreachable(stored.url, e) from None
        except Exception as e:  # a store may raise anything
            raise unreachable(stored.url, e) from None


def _begin(path: Path, stored: Stored) -> None:
    """Claim the folder. One that holds anything else is left as it is."""
    mark = path / BEGUN
    if path.exists() and not path.is_dir():
        raise _taken(path)
    if path.is_dir() and any(path.iterdir()) and not (mark.exists() and mark.read_text() == stored.identity.run):
        raise _taken(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_whole(mark, stored.identity.run.encode())
    except OSError as e:
        fix = "choose another --dir"
        raise StoreError(f"cannot write to {path}: {e.strerror}", fix, kind="run_dir_not_writable") from None


def _taken(path: Path) -> StoreError:
    return StoreError(
        f"{path} is there already, and not empty",
        f"choose another --dir, or, if the run is in there, `pmtrain coordinator --resume --dir {path}`",
        kind="run_dir_taken",
    )


def _fetch(stored: Stored, path: Path, base: Path | None, say: Callable[[str], None]) -> Taken:
    told = list[notices.Notice]()
    names = stored.names()
    manifests = _manifests(stored, names, told)
    copy = _newest_journal(stored, told)
    if copy is not None and not _is_current(copy.history, manifests):
        told.append(notices.StoredUnusable(JOURNALS[0], "a snapshot beside it is newer"))
        copy = None
    if copy is not None and not _fetch_bases(stored, copy.history, path):
        told.append(notices.StoredUnusable(JOURNALS[0], "a basis that it needs is missing or damaged"))
        copy = None
    if copy is not None:  # it says which snapshots are the run's, by their hashes
        right = {mark.key: mark.parts for mark in copy.history.snapshots}
        manifests = {key: m for key, m in manifests.items() if right.get(key) == m.mark.parts}
    damaged = _fetch_newest(stored, manifests, path, told, say)
    highest = [taken_over(names), *(int(m[1]) for name in names if (m := NAMED.fullmatch(name)))]
    lineage = LINEAGES + max(*highest, 1, 0 if copy is None else copy.history.highest_lineage)
    if copy is not None:
        history = continued(copy.history, set(manifests), damaged, lineage)
    else:
        history = history_from(_beginning(stored, path), _marks(manifests), lineage, 0)
    stored.files.pipe_file(f"{stored.root}/taken-over-{lineage}", b"")
    _write_run(stored, path, base, names)
    create(path / JOURNAL, stored.identity, history, time.time())
    (path / BEGUN).unlink()
    told.append(notices.TookOver(stored.url, history.step, history.newest.step, copy is not None))
    return Taken(path, tuple(told), () if copy is None else copy.addresses)


def _manifests(stored: Stored, names: set[str], told: list[notices.Notice]) -> dict[Key, Manifest]:
    """What snapshots there say of themselves, where it is this run's."""
    found = dict[Key, Manifest]()
    for name in sorted(name for name in names if NAMED.fullmatch(name)):
        try:
            one = manifest.parse(stored.read(f"{name}/{MANIFEST}"))
            one.identity.check(stored.identity)
            if folder_name(*one.mark.key) != name or not one.mark.parts or len(one.mark.layers) != len(one.mark.parts):
                raise ValueError(f"{MANIFEST} describes another snapshot")
            found[one.mark.key] = one
        except FileNotFoundError:
            continue  # it was being copied
        except (ValueError, WrongIdentity) as e:
            told.append(notices.StoredUnusable(name, str(e)))
    return found


def _newest_journal(stored: Stored, told: list[notices.Notice]) -> JournalCopy | None:
    copies = [read_sealed(stored.files, f"{stored.root}/{name}", stored.key, JournalCopy) for name in JOURNALS]
    whole = [copy for copy in copies if copy is not None and copy.identity == stored.identity]
    if not whole:
        told.append(notices.StoredUnusable(JOURNALS[0], "missing or damaged"))
    return max(whole, key=lambda copy: copy.age, default=None)


def _is_current(history: History, manifests: dict[Key, Manifest]) -> bool:
    known = {mark.key for mark in history.snapshots} | {d.key for d in history.dropped if d.complete}
    return max(manifests, default=(0, 0)) <= max(known)


def _fetch_bases(stored: Stored, history: History, path: Path) -> bool:
    """Those that the journal needs. Whether all were there, with the right bytes."""
    if not stored.spec.subspace.has_basis:
        return True
    (path / BASES).mkdir(exist_ok=True)
    for version in bases_needed(history):
        try:
            write_whole(path / BASES / basis_name(version), stored.read(f"{BASES}/{basis_name(version)}"))
        except FileNotFoundError:
            return False
    try:
        subspace = Subspace(stored.spec, path / BASES, resumed=True)
        for version, sha256 in bases_needed(history).items():
            subspace.load(version, sha256)
    except UserError:
        return False
    return True


def _fetch_newest(
    stored: Stored,
    manifests: dict[Key, Manifest],
    path: Path,
    told: list[notices.Notice],
    say: Callable[[str], None],
) -> set[Key]:
    """The newest whole snapshot. Those after it, which are damaged, are taken out of `manifests` and returned; those
    before it stay in the store, and come when they are needed."""
    damaged = dict[Key, str]()
    for key in sorted(manifests, reverse=True):
        one, name = manifests[key], folder_name(*key)
        total = sum(file.size for file in one.files.values())
        say(f"fetching the snapshot at step {key[1]} ({size(total)}) from {stored.url} …")
        try:
            _fetch_snapshot(stored, one, path / SNAPSHOTS / name)
            _keep_bases(path, one)
            break
        except ValueError as e:
            shutil.rmtree(path / SNAPSHOTS / name)
            told.append(notices.StoredUnusable(name, str(e)))
            damaged[key] = f"{stored.url}/{name}: {e}"
            del manifests[key]
    if damaged and not manifests:
        what = f"no snapshot in the store is whole; the newest: {damaged[max(damaged)]}"
        raise StoreError(what, "restore that file from a copy of the store, and try again", kind="store_damaged")
    return set(damaged)


def _fetch_snapshot(stored: Stored, one: Manifest, folder: Path) -> None:
    """Raises ValueError with the reason where it is damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {part_name(stage): sha256 for stage, sha256 in enumerate(one.mark.parts)}
    for name in map(basis_name, bases_of(one.mark)):
        wanted[name] = one.files[name].sha256 if name in one.files else ""
    for name, sha256 in wanted.items():
        file, work = folder / name, folder / f"{name}.partial"
        if file.exists() and hash_file(file) == sha256:
            continue  # of a takeover that was interrupted
        if _stays_there(stored, one, folder, name):
            continue
        try:
            stored.files.get_file(f"{stored.root}/{folder.name}/{name}", str(work))
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
        if hash_file(work) != sha256:
            work.unlink()
            raise ValueError(f"{name} is damaged (hash mismatch)")
        put_in_place(work, file)
    write_whole(folder / MANIFEST, as_json(one, indent=1))


def _stays_there(stored: Stored, one: Manifest, folder: Path, name: str) -> bool:
    """A part that its peer put into the store stays there, if it has the right size: whoever fetches it checks its
    hash."""
    for stage, sha256 in enumerate(one.mark.parts):
        if name == part_name(stage) and name in one.files:
            at = f"{stored.root}/{folder.name}/{stored_name(stage, sha256)}"
            with contextlib.suppress(FileNotFoundError):
                if stored.files.size(at) == one.files[name].size:
                    write_whole(stored_mark(folder, stage, sha256), str(one.files[name].size).encode())
                    return True
    return False


def _keep_bases(path: Path, one: Manifest) -> None:
    (path / BASES).mkdir(exist_ok=True)
    for name in map(basis_name, bases_of(one.mark)):
        if not (path / BASES / name).exists():
            content = (path / SNAPSHOTS / folder_name(*one.mark.key) / name).read_bytes()
            write_whole(path / BASES / name, content)


def _marks(manifests: dict[Key, Manifest]) -> list[Mark]:
    """The oldest first, each of a later step than the one before: a later lineage has the word."""
    marks = list[Mark]()
    for key in sorted(manifests, reverse=True):
        if not marks or key[1] < marks[0].step:
            marks.insert(0, manifests[key].mark)
    return marks


def _beginning(stored: Stored, path: Path) -> History:
    if not stored.spec.subspace.has_basis:
        return beginning("")
    first = basis_name(0)
    (path / BASES).mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # then it is made from the seed
        write_whole(path / BASES / first, stored.read(f"{BASES}/{first}"))
    return beginning(Subspace(stored.spec, path / BASES, resumed=True).sha256(0))


def continued(history: History, stored: set[Key], damaged: set[Key], lineage: int) -> History:
    """The lost coordinator's history, for one that has these snapshots: as after a restart, and nothing that the lost
    one may have opened since is opened again. `lineage`: up to which others may have come.

    The newest snapshot that the store did not get in time is wanted from the peers again, who have its parts."""
    first, *others = history.snapshots
    here, lost = [m for m in others if m.key in stored], [m for m in others if m.key not in stored]
    newest = max([first.step, *(mark.step for mark in here)])
    missed = [m for m in lost if m.lineage == history.lineage and m.step > newest and m.key not in damaged]
    dropped = [Dropped(*m.key, complete=True, unusable=m.key in damaged) for m in lost if m not in missed[-1:]]
    return replace(
        history,
        snapshots=(first, *here),
        pending=(*(replace(mark, parts=()) for mark in missed[-1:]), *history.pending),
        dropped=(*history.dropped, *dropped),
        generation=history.generation + (lineage - history.lineage) * GENERATIONS,
        reserved=lineage,
    )


def _write_run(stored: Stored, path: Path, base: Path | None, names: set[str]) -> None:
    """All but the journal. The secrets come last: with them and a snapshot, the folder counts as a run's."""
    base = Path(stored.papers.private.base) if base is None else base.resolve()
    saved = with_absolute_paths(stored.spec, base).model_dump(mode="json")
    write_whole(path / "run.yaml", yaml.safe_dump(saved, sort_keys=False).encode())
    for name in set(KEPT) & names:
        write_whole(path / name, stored.read(name))
    own_key(path, stored.key)
    (path / "ca").mkdir(mode=0o700, exist_ok=True)
    write_whole(path / "ca" / "ca.key", stored.papers.key.encode(), 0o600)
    write_whole(path / "ca" / "ca.pem", stored.papers.certificate.encode())
    write_whole(path / PRIVATE, as_json(replace(stored.papers.private, base=str(base))), 0o600)


def _no_run(url: str, below: list[str]) -> StoreError:
    if below:
        fix = f"name one of them, for example {url.rstrip('/')}/{below[-1]}"
        return StoreError(f"{url} holds copies of {len(below)} runs: {', '.join(below)}", fix, kind="several_runs")
    fix = "check the URL: it is what snapshots.copy_to of the run says, or the run's own folder there"
    return StoreError(f"there is no copy of a run at {url}", fix, kind="store_no_run")


def unreachable(url: str, error: Exception) -> StoreError:
    fix = "check the URL, the connection and the credentials, and run the same command again"
    return StoreError(f"cannot use the store {url}: {in_words(error)}", fix, kind="store_unreachable")
