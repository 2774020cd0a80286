"""A coordinator that continues a run from its store: what it takes over, what it does not, and how it refuses."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_spec
from led import Led
from machine_bench import peer
from test_rebuild import PLACED, decided
from test_snapshots import CONTENTS, HASHES

from protomodels_cli.coordinator import events, machine
from protomodels_cli.coordinator.assigning import is_current
from protomodels_cli.coordinator.deposit import AUTHORITY, JOURNALS, Deposit
from protomodels_cli.coordinator.history import Began, History, Record, RolledBack, Saved, beginning, fold
from protomodels_cli.coordinator.notices import Notice, StoredUnusable, TookOver
from protomodels_cli.coordinator.peers import Holding
from protomodels_cli.coordinator.reasons import StagesLost
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.seal import KEY_FILE, StoreKey, StoreKeyError, read_key
from protomodels_cli.coordinator.snapshots.copies import Copies
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.coordinator.subspace import Subspace
from protomodels_cli.coordinator.takeover import Stored, StoreError, Taken, open_store, take_over
from protomodels_cli.coordinator.trust import believe
from protomodels_cli.errors import EXIT_OUTSIDE

SAVED = Saved(2, HASHES), Saved(4, HASHES)
TO_STEP_2 = PLACED, decided(1), decided(2), Began(2)


class Lost:
    """A run whose coordinator had a store, and is gone."""

    def __init__(self, folder: Path):
        self.folder, self.url = folder, (folder / "store").as_uri()
        self.run_dir = open_run_dir(folder / "lost", make_spec(stages=2), folder)
        bases = self.run_dir.path / "basis"
        self.subspace = Subspace(self.run_dir.spec, bases, resumed=False)
        self.subspace.store_first()
        self.run_dir.write_link("192.0.2.1", 7420)
        self.history: History = beginning(self.subspace.sha256(0))
        self.snapshots = Snapshots(
            self.run_dir.path / "snapshots", self.run_dir.identity, (1, self.subspace.t_fixed_sha256), bases
        )
        self.told = list[Notice]()

    def decide(self, *records: Record) -> None:
        for record in records:
            self.history = fold(self.history, record)

    def save(self) -> None:
        """The files of the newest snapshot."""
        for stage, content in enumerate(CONTENTS):
            path = self.snapshots.coming(*self.history.newest.key, stage, HASHES[stage])
            path.write_bytes(content)
            self.snapshots.arrived(path)
        self.snapshots.settle(lambda: self.history)

    def copy(self, journal: bool = True, snapshots: bool = True) -> None:
        copies = Copies(self.url, "home", history=lambda: self.history)
        if snapshots:
            complete = self.snapshots.folders(self.history.snapshots)
            copies.bring_up_to_date(complete, [], self.snapshots.reading)

        async def deposit() -> None:
            one = Deposit(Led(history=lambda: self.history, tell=self.told.append), copies, self.run_dir)
            one.again()
            await one.end()

        if journal:
            asyncio.run(deposit())

    @property
    def there(self) -> Path:
        return self.folder / "store/home"

    def stored(self, key: StoreKey | None = None) -> Stored:
        return open_store(self.url, key or read_key(self.run_dir.path / KEY_FILE))

    def taken(self, name: str = "new") -> tuple[Taken, History]:
        taken = take_over(self.stored(), self.folder / name, None, lambda text: None)
        return taken, believe(taken.path, self.run_dir.identity)[0]


@pytest.fixture
def lost(tmp_path: Path) -> Lost:
    """Saved and copied at step 2, at step 3 when it was lost."""
    run = Lost(tmp_path)
    run.decide(*TO_STEP_2, SAVED[0])
    run.save()
    run.decide(decided(3))
    run.copy()
    return run


def unusable(taken: Taken) -> list[str]:
    return [notice.name for notice in taken.found if isinstance(notice, StoredUnusable)]


def test_what_is_in_memory_counts_where_the_journal_was_copied_to_the_last(lost: Lost):
    taken, history = lost.taken()
    assert taken.found == (TookOver(f"{lost.url}/home", 3, 2, in_memory=True),)
    assert taken.addresses == (("192.0.2.1", 7420),)
    same = {"generation": lost.history.generation, "reserved": 0}
    assert replace(history, **same) == lost.history
    assert history.generation > lost.history.generation + 1000
    for applied, counts in ((2, False), (3, True), (4, False)):
        assert is_current(history, Holding(1, 0, (2, 2), applied, 0)) == counts
    assert not is_current(history, Holding(2, 0, (2, 2), 3, 0)), "of a rollback that the store did not hear of"
    folder = open_run_dir(taken.path, None, Path())
    assert (folder.token, folder.owner, folder.peers_key) == (
        lost.run_dir.token,
        lost.run_dir.owner,
        lost.run_dir.peers_key,
    )
    assert folder.authority.fingerprint == lost.run_dir.authority.fingerprint
    for file in ("private.json", "ca/ca.key", KEY_FILE):
        assert (taken.path / file).stat().st_mode & 0o777 == 0o600
    for part in ("stage-0.safetensors", "stage-1.safetensors", "snapshot.json"):
        assert (taken.path / "snapshots/0001-00000002" / part).read_bytes() == (
            lost.run_dir.path / "snapshots/0001-00000002" / part
        ).read_bytes()


def test_a_peer_that_the_lost_coordinator_gave_a_stage_unheard_is_no_liar(lost: Lost):
    """Its claim counts for nothing, and it stays."""
    spec, (_, history) = lost.run_dir.spec, lost.taken()
    state = machine.resume(spec, (1, "t"), history, 0.0)
    unheard = replace(peer(7), holding=Holding(1, 0, (2, 2), 3))
    state, records, commands = machine.apply(state, events.Joined(unheard), 0.0)
    assert unheard.id in state.peers
    assert (state.seats.holds, records, [c for c in commands if isinstance(c, events.Dismiss)]) == ({}, [], [])


def test_a_rollback_after_it_opens_a_lineage_that_nobody_has_seen(lost: Lost):
    _, history = lost.taken()
    assert history.highest_lineage > 1000
    back = fold(history, RolledBack(history.highest_lineage + 1, 1, 2, StagesLost((0,), 3)))
    assert (back.step, back.lineage) == (2, history.highest_lineage + 1)


@pytest.mark.parametrize("journal", ["outdated", "damaged", "no-basis"])
def test_without_a_current_journal_it_continues_from_the_newest_snapshot(lost: Lost, journal: str):
    if journal == "outdated":
        lost.decide(decided(4), Began(4), SAVED[1])
        lost.save()
        lost.copy(journal=False)
    elif journal == "damaged":
        for path in lost.there.glob("journal-*"):
            path.write_bytes(path.read_bytes()[:-1])
    else:
        (lost.there / "basis/000000.u").unlink()
    taken, history = lost.taken()
    newest = 4 if journal == "outdated" else 2
    assert taken.found[-1] == TookOver(f"{lost.url}/home", newest, newest, in_memory=False)
    assert JOURNALS[0] in unusable(taken)
    assert (history.step, history.lineage > 1000, history.holders) == (newest, True, ())
    assert [mark.step for mark in history.snapshots] == [0, 2, 4][: 2 + (newest == 4)]


def test_of_two_journals_the_newest_whole_one_counts(lost: Lost):
    lost.decide(decided(4))
    lost.copy()
    newest = max(lost.there.glob("journal-*"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:100])
    assert lost.taken()[1].step == 3


def test_a_damaged_snapshot_is_passed_over_and_without_a_whole_one_it_refuses(lost: Lost):
    lost.decide(decided(4), Began(4), SAVED[1])
    lost.save()
    lost.copy()
    part = lost.there / "0001-00000004/stage-1.safetensors"
    part.write_bytes(b"rot" + part.read_bytes()[3:])
    taken, history = lost.taken()
    assert unusable(taken) == ["0001-00000004"]
    assert (history.step, history.newest.step) == (4, 2)
    (lost.there / "0001-00000002/stage-0.safetensors").unlink()
    with pytest.raises(StoreError) as said:
        lost.taken("another")
    assert (said.value.kind, said.value.exit_code) == ("store_damaged", EXIT_OUTSIDE)
    assert "0001-00000004" in str(said.value)
    assert not (lost.folder / "another/journal.sqlite").exists()


def test_a_snapshot_that_the_store_did_not_get_is_asked_for_again(lost: Lost):
    lost.decide(decided(4), Began(4), SAVED[1])
    lost.save()
    lost.copy(snapshots=False)
    _, history = lost.taken()
    assert (history.newest.step, [mark.key for mark in history.pending]) == (2, [(1, 4)])
    assert fold(history, SAVED[1]).newest.parts == HASHES


def test_who_takes_over_twice_takes_none_for_the_other(lost: Lost):
    first, second = lost.taken("first")[1], lost.taken("second")[1]
    assert second.highest_lineage > first.highest_lineage
    assert second.generation > first.generation + 1000
    for path in lost.there.glob("journal-*"):
        path.unlink()
    third = lost.taken("third")[1]
    assert third.lineage > second.highest_lineage
    assert third.generation > second.generation


def test_before_the_first_snapshot_it_begins_again(tmp_path: Path):
    run = Lost(tmp_path)
    run.copy()
    (run.there / JOURNALS[0]).unlink()
    assert run.taken()[1].step == 0


def test_a_takeover_that_was_interrupted_goes_on(lost: Lost, monkeypatch: pytest.MonkeyPatch):
    files = type(lost.stored().files)
    get = files.get_file

    def fails(self, path, to, **options):
        if "stage-1" in path:
            raise ConnectionError("gone")
        get(self, path, to, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "get_file", fails)
        with pytest.raises(StoreError) as said:
            lost.taken()
    assert (said.value.kind, said.value.exit_code) == ("store_unreachable", EXIT_OUTSIDE)
    assert lost.taken()[1].step == 3


def refused(lost: Lost, url: str | None = None, path: str = "new", key: StoreKey | None = None) -> str:
    with pytest.raises(StoreError) as said:
        take_over(
            open_store(url or lost.url, key or read_key(lost.run_dir.path / KEY_FILE)),
            lost.folder / path,
            None,
            lambda text: None,
        )
    assert said.value.exit_code == EXIT_OUTSIDE
    return said.value.kind


def test_it_refuses_what_it_cannot_use(lost: Lost):
    assert refused(lost, key=StoreKey(b"x" * 32)) == "store_key_wrong"
    assert refused(lost, (lost.folder / "nowhere").as_uri()) == "store_no_run"
    assert refused(lost, "nosuch://bucket") == "store_unknown"
    assert refused(lost, path="lost") == "run_dir_taken"
    shutil.copytree(lost.there, lost.folder / "store/second")
    assert refused(lost) == "several_runs"
    (lost.folder / "store/second" / AUTHORITY).write_bytes(b"pmtrain sealed 1\n")
    assert refused(lost, f"{lost.url}/second") == "store_damaged"
    (lost.folder / "store/second" / AUTHORITY).unlink()
    (lost.folder / "store/second/spec.json").touch()
    assert refused(lost, f"{lost.url}/second") == "store_without_authority"
    (lost.folder / "key").write_text("something else")
    for file, kind in (("key", "store_key_malformed"), ("no key", "store_key_unreadable")):
        with pytest.raises(StoreKeyError) as said:
            read_key(lost.folder / file)
        assert (said.value.kind, said.value.exit_code) == (kind, EXIT_OUTSIDE)
    assert not (lost.folder / "new").exists()
