"""What a coordinator leaves in the store beside the snapshots: whole, current, and nothing secret in clear."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st
from led import Led
from waiting import until

from protomodels_cli.coordinator import deposit as deposits
from protomodels_cli.coordinator.deposit import AUTHORITY, JOURNALS, Deposit, JournalCopy, Papers, unsealed
from protomodels_cli.coordinator.history import Decided, History, beginning, fold
from protomodels_cli.coordinator.notices import JournalNotCopied, Notice, StoreKeyMade
from protomodels_cli.coordinator.run_dir import RunDir, open_run_dir
from protomodels_cli.coordinator.seal import KEY_FILE, NotWhole, OtherKey, StoreKey, StoreKeyError, own_key, parse_key
from protomodels_cli.coordinator.snapshots.copies import Copies, TakenOver
from protomodels_cli.files import hash_file

KEY, OTHER = StoreKey(b"k" * 32), StoreKey(b"o" * 32)


@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(1, 255))
def test_what_is_sealed_opens_with_the_key_alone_and_only_if_it_is_whole(content: bytes, at: int, flip: int):
    sealed = KEY.seal("this", content)
    assert KEY.open("this", sealed) == content
    assert KEY.seal("this", content) != sealed
    with pytest.raises(OtherKey):
        OTHER.open("this", sealed)
    with pytest.raises(NotWhole):
        KEY.open("that", sealed)
    at %= len(sealed)
    with pytest.raises((NotWhole, OtherKey)):
        KEY.open("this", sealed[:at] + bytes([sealed[at] ^ flip]) + sealed[at + 1 :])
    with pytest.raises(NotWhole):
        KEY.open("this", sealed[:at])


def test_a_key_is_one_line(tmp_path: Path):
    assert parse_key(f" {KEY.text}\n", "here") == KEY
    assert KEY.text not in repr(KEY)
    for wrong in ("", "x" * 43, KEY.text[:-1], KEY.text + "A", KEY.text.replace(":", ";"), KEY.text[:-2] + "é="):
        with pytest.raises(StoreKeyError) as said:
            parse_key(wrong, "here")
        assert said.value.kind == "store_key_malformed"
        assert not wrong or wrong not in str(said.value)


def test_the_run_has_one_key(tmp_path: Path):
    made, is_new = own_key(tmp_path, None)
    assert is_new
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert own_key(tmp_path, None) == own_key(tmp_path, made) == (made, False)
    with pytest.raises(StoreKeyError) as said:
        own_key(tmp_path, OTHER)
    assert said.value.kind == "store_key_other"
    (tmp_path / KEY_FILE).unlink()
    assert own_key(tmp_path, OTHER) == (OTHER, False)
    assert parse_key((tmp_path / KEY_FILE).read_text(), "here") == OTHER


class Desk:
    """A run directory, and a store that its journal goes to."""

    def __init__(self, folder: Path):
        self.store, self.told = folder / "store", list[Notice]()
        self.run_dir: RunDir = open_run_dir(folder / "run", make_spec(), folder)
        (self.run_dir.path / "basis").mkdir()
        (self.run_dir.path / "basis/000000.u").write_bytes(b"first basis")
        self.run_dir.write_link("example.org", 7420, [("2001:db8::1", 1)])
        self.history: History = beginning("u")
        self.copies = Copies(self.store.as_uri(), "home", history=lambda: self.history)
        self.open()

    def open(self) -> None:
        self.deposit = Deposit(Led(history=lambda: self.history, tell=self.told.append), self.copies, self.run_dir)
        self.key = parse_key((self.run_dir.path / KEY_FILE).read_text(), "here")

    def decide(self, step: int) -> None:
        self.history = fold(self.history, Decided(step, True, 1e-3, 1.0, 5.0, 1.0, 1, 10, 20))
        self.deposit.again()

    def journals(self) -> dict[str, JournalCopy]:
        here = {name: self.store / "home" / name for name in JOURNALS}
        return {n: unsealed(self.key, JournalCopy, path.read_bytes()) for n, path in here.items() if path.exists()}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(deposits, "EVERY", 0.01)
    monkeypatch.setattr(deposits, "AGAIN", (0.01, 0.02))
    return Desk(tmp_path)


def test_the_store_gets_authority_basis_and_every_journal_in_turns_and_no_secret_in_clear(desk: Desk):
    async def lead(*steps: int) -> None:
        for step in steps:
            desk.decide(step)
            await until(lambda: desk.deposit._copied is desk.history)
        await desk.deposit.end()

    asyncio.run(lead(1, 2, 3))
    assert sorted(copy.history.step for copy in desk.journals().values()) == [2, 3]
    newest = max(desk.journals().values(), key=lambda copy: copy.age)
    assert (newest.history, newest.identity) == (desk.history, desk.run_dir.identity)
    assert newest.addresses == (("example.org", 7420), ("2001:db8::1", 1))
    papers = unsealed(desk.key, Papers, (desk.store / "home" / AUTHORITY).read_bytes())
    assert papers == Papers.of(desk.run_dir)
    assert (desk.store / "home/basis/000000.u").read_bytes() == b"first basis"
    private, key = papers.private, papers.key.splitlines()[1]
    for file in (path for path in desk.store.rglob("*") if path.is_file()):
        for secret in (private.token, private.owner, private.peers_key, key, desk.key.text, desk.key.secret.hex()):
            assert secret.encode() not in file.read_bytes(), file
    [made] = desk.told
    assert isinstance(made, StoreKeyMade)
    assert desk.key.text not in repr(made)
    before = hash_file(desk.store / "home" / AUTHORITY)
    desk.open()  # as after a restart
    asyncio.run(lead(4))
    assert hash_file(desk.store / "home" / AUTHORITY) == before, "a whole one is not written again"
    assert sorted(copy.history.step for copy in desk.journals().values()) == [3, 4], "the older one made room"


def test_a_journal_is_copied_once_a_store_that_was_down_is_back(desk: Desk):
    async def lead() -> None:
        desk.store.touch()  # so that it cannot be a folder
        desk.decide(1)
        await until(lambda: len(desk.told) == 2, "it was not told")
        assert [type(notice) for notice in desk.told] == [StoreKeyMade, JournalNotCopied]
        desk.store.unlink()
        await until(lambda: desk.store.exists() and desk.journals(), "the journal was not copied")

    asyncio.run(lead())
    assert [copy.history.step for copy in desk.journals().values()] == [1]


def test_a_coordinator_whose_run_was_taken_over_leaves_the_store_alone(desk: Desk):
    async def lead(step: int) -> None:
        desk.decide(step)
        await desk.deposit.end()

    asyncio.run(lead(1))
    (desk.store / "home/taken-over-1001").touch()
    before = {path: path.read_bytes() for path in desk.store.rglob("*.sealed")}
    desk.open()
    asyncio.run(lead(2))
    assert {path: path.read_bytes() for path in desk.store.rglob("*.sealed")} == before
    assert isinstance(desk.told[-1], JournalNotCopied)
    with pytest.raises(TakenOver):
        desk.copies.bring_up_to_date([], [], lambda folder: pytest.fail("it was copied"))
    desk.history = replace(desk.history, reserved=1001)  # the one that took over
    asyncio.run(lead(3))
    assert 3 in [copy.history.step for copy in desk.journals().values()]
