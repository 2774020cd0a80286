"""What goes to the store beside the snapshots, so that a coordinator can continue the run on another machine.

URL/NAME-FINGERPRINT/authority.sealed                      the run's authority, token and other secrets
URL/NAME-FINGERPRINT/journal-0.sealed, journal-1.sealed    the journal, folded into one; in turns, so that one is whole
URL/NAME-FINGERPRINT/basis/VERSION.u                       every basis that the journal needs

What is sealed only the owner's key opens (seal.py). Journals follow the run as fast as the store takes them, a second
apart at least; what peers have in memory counts elsewhere if the last one arrived. takeover.py reads all of it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.as_json import as_json, from_json
from protomodels_cli.coordinator.file_names import BASES
from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.run import Run
from protomodels_cli.coordinator.run_dir import Private, RunDir, private_of
from protomodels_cli.coordinator.seal import KEY_FILE, NotWhole, OtherKey, StoreKey, own_key
from protomodels_cli.coordinator.snapshots.copies import Copies, in_words, names_in
from protomodels_cli.coordinator.snapshots.manifest import basis_name
from protomodels_cli.coordinator.snapshots.upkeep import Repeated, beside
from protomodels_cli.coordinator.subspace import bases_needed
from protomodels_cli.observe import logs
from protomodels_cli.retry import Backoff

if TYPE_CHECKING:
    import fsspec

AUTHORITY, JOURNALS = "authority.sealed", ("journal-0.sealed", "journal-1.sealed")
EVERY, SHARE = 1.0, 9.0  # seconds between two journals, and times what the last one took: a slow store is spared
AGAIN = 1.0, 60.0  # seconds until a store that failed is tried again: at first, at most
T = TypeVar("T")


@dataclass(frozen=True)
class Papers:
    """The secrets of a run."""

    certificate: str  # of its authority, PEM
    key: str
    private: Private

    @classmethod
    def of(cls, run_dir: RunDir) -> Papers:
        folder = run_dir.path / "ca"
        return cls((folder / "ca.pem").read_text(), (folder / "ca.key").read_text(), private_of(run_dir.path))


@dataclass(frozen=True)
class JournalCopy:
    identity: RunIdentity
    history: History
    at: float  # when it was written, seconds since 1970
    addresses: tuple[tuple[str, int], ...]  # at which the run's peers look for a coordinator

    @property
    def age(self) -> tuple[int, int, int, float]:
        """The newer, the greater: no two coordinators share a generation."""
        return self.history.generation, self.history.lineage, self.history.step, self.at


def sealed(key: StoreKey, what: Papers | JournalCopy) -> bytes:
    return key.seal(type(what).__name__, as_json(what))


def unsealed(key: StoreKey, kind: type[T], content: bytes) -> T:
    """Raises OtherKey and NotWhole."""
    opened = key.open(kind.__name__, content)
    try:
        return from_json(kind, opened)
    except ValueError as e:  # of another version of pmtrain, say
        raise NotWhole(f"not readable by this pmtrain: {str(e).splitlines()[0]}") from None


class Deposit:
    def __init__(
        self,
        run: Run,
        copies: Copies,
        run_dir: RunDir,
    ):
        self._run, self._copies, self._run_dir = run, copies, run_dir
        self._key, self._made_key = own_key(run_dir.path, run_dir.store_key)
        logs.hide(self._key.text)
        self._working, self._hurry = Repeated(self._work), asyncio.Event()
        self._backoff, self._next = Backoff(*AGAIN), 0.0
        self._store: tuple[fsspec.AbstractFileSystem, str] | None = None
        self._slot, self._bases = 0, set[int]()
        self._copied: History | None = None

    def again(self) -> None:
        """The journal has more than was copied."""
        if self._made_key:
            self._made_key = False
            self._run.tell(notices.StoreKeyMade(str(self._run_dir.path / KEY_FILE), self._copies.url))
        self._working.again()

    def papers_changed(self) -> None:
        """Tokens, or who was kicked: the next copy looks at them again."""
        self._store = None
        self.again()

    async def end(self) -> None:
        """Copy what is there, once more where that fails."""
        self._hurry.set()
        await self._working.end()

    async def _work(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), max(0.0, self._next - time.monotonic()))
        began = time.monotonic()
        try:
            await beside(self._copy)
        except Exception as e:  # a store may raise anything
            self._store = None
            wait = self._backoff.after_failure(time.monotonic()) or AGAIN[1]
            if self._backoff.failures == 1:
                self._run.tell(notices.JournalNotCopied(self._copies.url, in_words(e)))
            if not self._hurry.is_set():
                self._next = time.monotonic() + wait
                self._working.again()
            return
        self._backoff.reset()
        took = time.monotonic() - began
        self._next = began + max(EVERY, SHARE * took)

    def _copy(self) -> None:
        """Blocks. The journal comes last: what it needs is there then."""
        files, root = self._store or self._open()
        self._copies.check_ours(names_in(files, root))
        history = self._run.history
        needed = {version for version, sha256 in bases_needed(history).items() if sha256}
        for version in sorted(needed - self._bases):
            try:
                content = (self._run_dir.path / BASES / basis_name(version)).read_bytes()
            except FileNotFoundError:
                if self._run.history == history:
                    raise
                return self._copy()  # it was forgotten meanwhile
            files.pipe_file(f"{root}/{BASES}/{basis_name(version)}", content)
            self._bases.add(version)
        if history is self._copied:  # the older copy is worth more than this one twice
            return None
        copy = JournalCopy(self._run_dir.identity, history, time.time(), self._run_dir.addresses())
        files.pipe_file(f"{root}/{JOURNALS[self._slot]}", sealed(self._key, copy))
        self._slot = 1 - self._slot
        for version in sorted(self._bases - needed):
            files.rm_file(f"{root}/{BASES}/{basis_name(version)}")
            self._bases.discard(version)
        self._store, self._copied = (files, root), history
        return None

    def _open(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """Connect, and see to it that the authority is there. A whole one is not written again: a kill could leave half
        of it."""
        files, root = self._copies.connect()
        self._copies.check_ours(names_in(files, root))
        files.makedirs(f"{root}/{BASES}", exist_ok=True)
        papers = Papers.of(self._run_dir)
        if read_sealed(files, f"{root}/{AUTHORITY}", self._key, Papers) != papers:
            files.pipe_file(f"{root}/{AUTHORITY}", sealed(self._key, papers))
        found = [read_sealed(files, f"{root}/{name}", self._key, JournalCopy) for name in JOURNALS]
        ages = [(0, 0, 0, 0.0) if copy is None else copy.age for copy in found]
        self._slot = ages.index(min(ages))
        self._bases = set()
        return files, root


def read_sealed(files: fsspec.AbstractFileSystem, path: str, key: StoreKey, kind: type[T]) -> T | None:
    """None where it is not there, or cannot be opened."""
    with contextlib.suppress(FileNotFoundError, OtherKey, NotWhole):
        return unsealed(key, kind, files.cat_file(path))
    return None
