"""Parts of snapshots on both disks and on their way: whole or not at all, going on where it broke off."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from conftest import make_spec
from fsspec.implementations.memory import MemoryFileSystem
from led import Led

from protomodels_cli.bench.recovery import beside
from protomodels_cli.cli.beginning import Beginning
from protomodels_cli.cli.folders import claim_or_find
from protomodels_cli.coordinator import bad_requests, events
from protomodels_cli.coordinator.bad_requests import BadRequest
from protomodels_cli.coordinator.history import Dropped, Ended, Mark, beginning
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.journal import Journal, create
from protomodels_cli.coordinator.notices import Notice, PartDamaged, PartRestored
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.seats import Preparation, assigned
from protomodels_cli.coordinator.snapshots.copies import Copies
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.coordinator.snapshots.uploads import Damaged, Later, Uploads
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Task, Working
from protomodels_cli.cost.part import part_contents
from protomodels_cli.errors import UserError
from protomodels_cli.safetensors_file import write_safetensors
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker.snapshots.flow import Throttle
from protomodels_cli.worker.snapshots.part_store import PartStore

RUN = RunIdentity("run", "spec")
SPEC = make_spec(stages=2)


def a_part(layers: range) -> bytes:
    """A stage's part of a snapshot, all zeros."""
    tensors = part_contents(SPEC, layers, 3, applied=True).always
    described = [(name, kept.dtype, kept.shape) for name, kept in tensors.items()]
    with tempfile.NamedTemporaryFile() as file:
        write_safetensors(Path(file.name), described, lambda name: bytes(tensors[name].nbytes))
        return Path(file.name).read_bytes()


CONTENTS = [a_part(range(2)), a_part(range(2, 4))]
HASHES = tuple(hashlib.sha256(content).hexdigest() for content in CONTENTS)


class Desk:
    """A coordinator's side of a run whose snapshot of step 3 was begun."""

    def __init__(self, folder: Path):
        begun = Mark(1, 3, 0, "u", layers=(2, 2))
        history = replace(beginning("u"), layers=(2, 2), stage_holders=(("p0",), ("p1",)), step=3, pending=(begun,))
        peers = {id: Peer(id, id, "cpu", 1 << 30, 1e9, "", 0, 0.0) for id in ("p0", "p1")}
        work = Working(Task(1, "step", 4, 0.0))
        self.state = State(SPEC, (1, "t"), history, peers, seats=assigned(["p0", "p1"], {}), work=work)
        self.told: list[events.Event] = []
        self.snapshots = Snapshots(folder / "snapshots", RUN, (1, "t"), folder / "basis")
        self.uploads = Uploads(Led(lambda: self.state, submit=self.told.append), None, self.snapshots)

    def prepares(self, peer: str, preparation: Preparation) -> None:
        self.state = replace(self.state, seats=self.state.seats.prepared(peer, preparation))

    def header(self, of: int, **changes: object) -> pb.UploadHeader:
        fields = {"lineage": 1, "step": 3, "stage": of, "size": len(CONTENTS[of]), "sha256": HASHES[of]}
        return pb.UploadHeader(**{**fields, **changes})

    def offered(self, peer: str, header: pb.UploadHeader) -> int | None:
        return asyncio.run(self.uploads.offered(peer, header))

    def hand_in(self, stage: int, content: bytes, **changes: object) -> None:
        async def chunks() -> AsyncIterator[pb.UploadChunk]:
            for start in range(0, len(content), PIECE):
                yield pb.UploadChunk(data=content[start : start + PIECE])

        asyncio.run(self.uploads.receive(f"p{stage}", self.header(stage, **changes), chunks()))


def test_an_upload_that_broke_off_goes_on_where_it_was(tmp_path: Path):
    desk = Desk(tmp_path)
    assert desk.offered("p0", desk.header(0)) == 0
    with pytest.raises(Later):
        desk.hand_in(0, CONTENTS[0][:3000])
    assert desk.offered("p0", desk.header(0)) == 3000
    with pytest.raises(Later):
        desk.hand_in(0, CONTENTS[0])  # not from the beginning
    desk.hand_in(0, CONTENTS[0][3000:], offset=3000)
    assert desk.offered("p0", desk.header(0)) is None, "it is here"
    assert desk.told == [events.PartsArrived(1, 3, frozenset({0}))]
    desk.hand_in(1, CONTENTS[1])
    assert desk.told[1:] == [events.SnapshotWhole(1, 3, HASHES)]


def test_an_upload_that_is_answered_is_stored(tmp_path: Path):
    desk = Desk(tmp_path)
    desk.snapshots.coming(1, 3, 0, HASHES[0]).mkdir()  # where its file would be
    with pytest.raises(Later):
        desk.hand_in(0, CONTENTS[0], offset=desk.offered("p0", desk.header(0)))
    assert [type(event) for event in desk.told] == [events.PartFailed]
    desk.hand_in(0, CONTENTS[0])
    desk.hand_in(0, CONTENTS[0])  # once more: it is here
    desk.state = replace(desk.state, history=replace(desk.state.history, pending=()))
    with pytest.raises(BadRequest) as error:
        desk.hand_in(1, CONTENTS[1])
    assert error.value.reason == bad_requests.SnapshotGivenUp(3)


def test_damaged_bytes_are_thrown_away_and_wanted_again(tmp_path: Path):
    desk = Desk(tmp_path)
    with pytest.raises(Damaged):
        desk.hand_in(0, b"x" + CONTENTS[0][1:])
    assert desk.offered("p0", desk.header(0)) == 0


@pytest.mark.parametrize("begun_again", [False, True])
def test_an_upload_whose_snapshot_was_given_up_meanwhile_does_no_harm(tmp_path: Path, begun_again: bool):
    """Also to the next try at the same step, of which another stage has handed in its part already."""
    desk = Desk(tmp_path)
    with pytest.raises(Later):
        desk.hand_in(0, CONTENTS[0][:3000])
    history = desk.state.history

    async def chunks() -> AsyncIterator[pb.UploadChunk]:
        yield pb.UploadChunk(data=CONTENTS[0][3000:4000])
        desk.state = replace(desk.state, history=replace(history, pending=()))
        desk.snapshots.drop(1, 3)
        if begun_again:
            desk.state = replace(desk.state, history=history)
            other = desk.snapshots.coming(1, 3, 1, HASHES[1])
            other.write_bytes(CONTENTS[1])
            desk.snapshots.arrived(other)
        yield pb.UploadChunk(data=CONTENTS[0][4000:])

    with pytest.raises(Later if begun_again else BadRequest) as error:
        asyncio.run(desk.uploads.receive("p0", desk.header(0, offset=3000), chunks()))
    assert begun_again or error.value.reason == bad_requests.SnapshotGivenUp(3)
    assert desk.told == []
    assert desk.snapshots.has(1, 3, 1) == begun_again


@pytest.mark.parametrize(
    ("peer", "changes", "reason"),
    [
        ("p1", {}, bad_requests.NotHolder(0)),  # holds another stage
        ("spare", {}, bad_requests.NotHolder(0)),
        ("p0", {"stage": 9}, bad_requests.UnknownPart(9)),
        ("p0", {"sha256": "../" * 21 + "x"}, bad_requests.UnknownPart(0)),
    ],
)
def test_what_nobody_asked_for_is_refused(
    tmp_path: Path, peer: str, changes: dict[str, object], reason: bad_requests.Reason
):
    desk = Desk(tmp_path)
    with pytest.raises(BadRequest) as error:
        desk.offered(peer, desk.header(0, **changes))
    assert error.value.reason == reason
    assert desk.offered("p0", desk.header(0, step=4)) is None, "of no snapshot that was begun"


def test_a_complete_snapshot_can_be_read_before_and_after_it_has_its_name(tmp_path: Path):
    desk = Desk(tmp_path)
    for stage, content in enumerate(CONTENTS):
        desk.hand_in(stage, content)
    mark = replace(desk.state.history.pending[0], parts=HASHES)
    desk.state = replace(desk.state, history=replace(desk.state.history, pending=(), snapshots=(mark,)))
    request = pb.FetchRequest(lineage=1, step=3, stage=1)
    for _ in range(2):
        assert fetched(desk.uploads, request) == CONTENTS[1]
        desk.snapshots.settle(lambda: desk.state.history)
    assert sorted(p.name for p in (tmp_path / "snapshots" / "0001-00000003").iterdir()) == [
        "snapshot.json",
        "stage-0.safetensors",
        "stage-1.safetensors",
    ]
    with pytest.raises(FileNotFoundError):
        fetched(desk.uploads, pb.FetchRequest(lineage=1, step=3, stage=2))


def fetched(uploads: Uploads, request: pb.FetchRequest) -> bytes:
    """The rest of a part, in one piece."""

    async def none() -> AsyncIterator[pb.FetchRequest]:
        for request in ():
            yield request

    async def read() -> bytes:
        request.size = PIECE
        return b"".join([piece async for piece in uploads.read_part(request, none())])

    return asyncio.run(read())


def test_only_what_the_journal_dropped_is_deleted(tmp_path: Path):
    snapshots, marks = complete(tmp_path / "snapshots", [3, 6, 9])
    for step in (6, 12, 15):
        snapshots.coming(1, step, 0, HASHES[0]).touch()
    dropped = Dropped(1, 3, True), Dropped(1, 6, False), Dropped(1, 12, False)
    snapshots.settle(lambda: replace(beginning("u"), snapshots=tuple(marks[2:]), dropped=dropped))
    assert {p.name for p in (tmp_path / "snapshots").iterdir()} == {"0001-00000006", "0001-00000009", ".0001-00000015"}


def test_a_peers_parts_are_whole_and_stay_until_they_may_go(tmp_path: Path):
    parts = PartStore(tmp_path)
    first, second = (parts.write(1, step, 0, {"w": torch.full((50,), step)}) for step in (3, 6))
    assert parts.all() == [first, second]
    assert parts.is_whole(first)
    path = parts.path(first)
    path.write_bytes(path.read_bytes()[:-1])
    assert not parts.is_whole(first)
    parts.keep({(1, 6)})
    assert parts.all() == [second]


def test_what_a_dead_process_left_half_written_goes_and_a_living_ones_stays(tmp_path: Path):
    (tmp_path / "1-3-0.999999999.partial").touch()
    (tmp_path / f"1-3-0.{os.getppid()}.partial").touch()
    PartStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"1-3-0.{os.getppid()}.partial"]


def complete(folder: Path, steps: list[int]) -> tuple[Snapshots, list[Mark]]:
    """Snapshots with their names, of two parts each."""
    marks = [Mark(1, step, 0, "u", parts=HASHES, layers=(2, 2)) for step in steps]
    snapshots = Snapshots(folder, RUN, (1, "t"), folder.parent / "basis")
    for mark in marks:
        for stage, content in enumerate(CONTENTS):
            path = snapshots.coming(1, mark.step, stage, HASHES[stage])
            path.write_bytes(content)
            snapshots.arrived(path)
    snapshots.settle(lambda: replace(beginning("u"), snapshots=tuple(marks)))
    return snapshots, marks


class ObjectStore(MemoryFileSystem):
    """As S3: there are no folders but those with something in them."""

    protocol = "objects"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...


def test_a_store_without_folders_is_as_good(tmp_path: Path):
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    snapshots, marks = complete(tmp_path / "snapshots", [3, 6, 9])
    copies = Copies("objects://bucket/runs", "home-1234")
    copies.bring_up_to_date(snapshots.folders(marks[:2]), [], snapshots.reading)
    copies.bring_up_to_date(snapshots.folders(marks[1:]), ["0001-00000003"], snapshots.reading)
    copies.get("0001-00000009", "stage-1.safetensors", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == CONTENTS[1]
    with pytest.raises(FileNotFoundError):
        copies.get("0001-00000003", "stage-1.safetensors", tmp_path / "gone")


def test_copies_follow_the_snapshots_and_touch_nothing_else(tmp_path: Path):
    snapshots, marks = complete(tmp_path / "snapshots", [3, 6, 9])
    copies = Copies((tmp_path / "store").as_uri(), "home-1234")
    copies.bring_up_to_date(snapshots.folders(marks[:2]), [], snapshots.reading)
    there = tmp_path / "store" / "home-1234"
    (there / "mine.txt").touch()
    (there / "0001-00000012").mkdir()  # of which the journal does not know
    (there / "0001-00000006" / "snapshot.json").unlink()  # as if it broke off
    (there / "0001-00000006" / "stage-1.safetensors").write_bytes(b"half")
    copies.bring_up_to_date(snapshots.folders(marks[1:]), ["0001-00000003"], snapshots.reading)
    left = ["0001-00000006", "0001-00000009", "0001-00000012", "mine.txt"]
    assert sorted(p.name for p in there.iterdir()) == left
    for mark in marks[1:]:
        folder = there / f"0001-{mark.step:08d}"
        assert [(folder / f"stage-{i}.safetensors").read_bytes() for i in (0, 1)] == CONTENTS
        assert (folder / "snapshot.json").exists()


def test_a_store_that_is_not_known_is_refused_with_the_fix():
    for url in ("nosuch://bucket", "gcs://bucket/run"):
        with pytest.raises(UserError, match=url) as error:
            Copies(url, "home-1234")
        assert error.value.kind == "store_unknown"


@pytest.mark.parametrize("damage", ["truncated", "gone", "folder"])
@pytest.mark.parametrize("copied", ["whole", "damaged", "not", "no store"])
def test_a_damaged_part_is_brought_back_where_there_is_a_copy(tmp_path: Path, damage: str, copied: str):
    snapshots, [mark] = complete(tmp_path / "snapshots", [3])
    copies = None if copied == "no store" else Copies((tmp_path / "store").as_uri(), "home")
    history = replace(beginning("u"), snapshots=(mark,))
    told: list[Notice] = []
    upkeep = Upkeep(Led(history=lambda: history, tell=told.append), snapshots, copies)
    if copies and copied == "not":
        (tmp_path / "store/home/basis").mkdir(parents=True)
    elif copies:
        copies.bring_up_to_date(snapshots.folders([mark]), [], snapshots.reading)
        if copied == "damaged":
            (tmp_path / "store/home/0001-00000003/stage-1.safetensors").write_bytes(b"other")
    folder = tmp_path / "snapshots/0001-00000003"

    async def settle() -> None:
        upkeep.settle()
        await upkeep.end()

    assert asyncio.run(upkeep.is_whole(mark, 1))
    match damage:
        case "truncated":
            (folder / "stage-1.safetensors").write_bytes(CONTENTS[1][:10])
        case "gone":
            (folder / "stage-1.safetensors").unlink()
        case "folder":
            shutil.rmtree(folder)
    if copied != "not":
        asyncio.run(settle())  # which must not take the copy for one too many
    assert asyncio.run(upkeep.is_whole(mark, 1)) == (copied == "whole")
    assert asyncio.run(upkeep.is_whole(mark, 0)) == (damage != "folder" or copied in ("whole", "damaged"))
    if copied == "whole":
        assert PartRestored(1, 3, copies.url) in told
        assert (folder / "stage-1.safetensors").read_bytes() == CONTENTS[1]
    elif copies:
        assert PartDamaged(1, 3, copies.url) in told


def test_a_throttle_is_never_faster_than_asked():
    async def send() -> float:
        throttle, began = Throttle(8e6), time.monotonic()
        for _ in range(3):
            await throttle.wait(50_000)
        return time.monotonic() - began

    assert asyncio.run(send()) >= 0.15


def test_the_same_command_finds_the_run_it_left_and_not_one_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    spec = make_spec(stages=2, name="home")
    first = claim_or_find(None, spec, Beginning())
    folder = open_run_dir(first, spec, tmp_path)
    create(first / "journal.sqlite", folder.identity, beginning("u"))
    journal = Journal(first / "journal.sqlite", folder.identity)
    assert claim_or_find(None, spec, Beginning()) == Path("runs/home-2"), "somebody leads it"
    folder.lock.close()
    assert claim_or_find(None, spec, Beginning()) == first
    assert claim_or_find(None, make_spec(stages=2, name="home", steps=9), Beginning()) == Path("runs/home-3"), (
        "another run"
    )
    again = open_run_dir(first, None, Path())
    assert (again.resumed, again.token, again.spec) == (True, folder.token, spec)
    assert again.secret_of("p1", 9) == folder.secret_of("p1", 9)
    again.lock.close()
    journal.append([Ended("sha")], 1.0)
    assert claim_or_find(None, spec, Beginning()) == Path("runs/home-4")


def test_what_snapshots_cost_is_found_in_a_run_that_is_disturbed_now_and_then():
    """0.1 s beside each, of 20 steps of 0.2 s."""
    steps = [0.2 + 0.1 * (step % 20 == 1) + 3.0 * (step % 37 == 0) for step in range(1, 201)]
    assert beside(steps) == pytest.approx(0.1 / 4)
    assert beside([0.2] * 200) == 0
