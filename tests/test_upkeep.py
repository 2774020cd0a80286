"""The files of snapshots, kept in line with the history: nothing that may still be of use is deleted."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from led import Led
from test_snapshots import CONTENTS, HASHES, RUN, complete, fetched
from waiting import PATIENCE

from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.history import Began, Dropped, Forgot, GaveUp, History, beginning, fold
from protomodels_cli.coordinator.notices import CopyFailed, Notice
from protomodels_cli.coordinator.snapshots import store
from protomodels_cli.coordinator.snapshots.copies import Copies, OutOfReach
from protomodels_cli.coordinator.snapshots.manifest import stored_name
from protomodels_cli.coordinator.snapshots.store import unknown_to
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.coordinator.snapshots.uploads import Uploads
from protomodels_cli.coordinator.state import State
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def fail(error: OSError) -> None:
    raise error


def kept(upkeep: Upkeep) -> None:
    async def settle() -> None:
        upkeep.settle()
        await upkeep.end()

    asyncio.run(settle())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_store_that_is_down_costs_no_copy_and_no_whole_part(tmp_path: Path):
    snapshots, marks = complete(tmp_path / "snapshots", [3, 6])
    copies = Copies((tmp_path / "store").as_uri(), "home")
    history = replace(beginning("u"), snapshots=(*beginning("u").snapshots, *marks))
    upkeep = Upkeep(Led(history=lambda: history, fail=fail), snapshots, copies)
    kept(upkeep)
    (tmp_path / "snapshots/0001-00000006/stage-1.safetensors").write_bytes(b"rot")
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").touch()  # so that it cannot be asked
    with pytest.raises(OutOfReach):
        asyncio.run(upkeep.is_whole(marks[1], 1))
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    history = fold(history, Forgot(1, 6, unusable=True))
    kept(upkeep)
    assert names(tmp_path / "snapshots") == ["0001-00000003"]
    assert (tmp_path / "set-aside-1/snapshots/0001-00000006/stage-0.safetensors").read_bytes() == CONTENTS[0]
    assert names(tmp_path / "store/home") == ["0001-00000003", "0001-00000006"]
    there = tmp_path / "store/home/0001-00000006"
    assert [(there / f"stage-{i}.safetensors").read_bytes() for i in (0, 1)] == CONTENTS
    there.rename(tmp_path / "snapshots/0001-00000006")  # by hand
    assert unknown_to(history.snapshots, history.dropped, tmp_path / "snapshots", RUN) is None
    history = fold(history, Forgot(1, 3))
    kept(upkeep)
    assert not (tmp_path / "store/home/0001-00000003").exists(), "one that is just not kept is deleted"


class Flaky:
    """A disk that cannot be read so many times."""

    def __init__(self, patch: pytest.MonkeyPatch, failures: int):
        self._open, self.left = Path.open, failures
        patch.setattr(store, "READ_AGAIN", 0.001)
        patch.setattr(Path, "open", lambda *arguments: self.open(*arguments))

    def open(self, path: Path, *mode: str) -> Any:
        if path.name.startswith("stage-") and self.left:
            self.left -= 1
            raise OSError(5, "Input/output error")
        return self._open(path, *mode)


@pytest.mark.parametrize("failures", [2, 1000])
def test_a_read_error_that_passes_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int):
    snapshots, [mark] = complete(tmp_path / "snapshots", [3])
    history = replace(beginning("u"), snapshots=(mark,))
    upkeep = Upkeep(Led(history=lambda: history, fail=fail), snapshots, None)
    told: list[events.Event] = []
    state = State(None, (1, "t"), history)  # type: ignore[arg-type]
    uploads = Uploads(Led(lambda: state, submit=told.append, fail=fail), None, snapshots)  # type: ignore[arg-type]
    request, disk = pb.FetchRequest(lineage=1, step=3, stage=1, offset=100), Flaky(monkeypatch, failures)
    assert asyncio.run(upkeep.is_whole(mark, 1)) == (failures == 2)
    disk.left = failures
    if failures == 2:
        assert fetched(uploads, request) == CONTENTS[1][100:]
    else:
        with pytest.raises(OSError, match="Input/output"):
            fetched(uploads, request)


def test_a_snapshot_that_is_begun_again_is_not_deleted_by_a_look_at_the_history_before_that(tmp_path: Path):
    snapshots, marks = complete(tmp_path / "snapshots", [3])
    path = snapshots.coming(1, 6, 0, HASHES[0])
    path.touch()
    given_up = replace(
        beginning("u"), snapshots=tuple(marks), lineage=1, step=6, dropped=(Dropped(1, 3, True), Dropped(1, 6, False))
    )
    begun = fold(given_up, Began(6))
    looks = iter([given_up, given_up, given_up])
    snapshots.settle(lambda: next(looks, begun))
    assert names(tmp_path / "snapshots") == [".0001-00000006"]
    given_up_again = fold(begun, GaveUp(6))
    snapshots.settle(lambda: given_up_again)
    assert names(tmp_path / "snapshots") == []


@pytest.mark.parametrize(("saved", "stays"), [([3], True), ([3, 9], False)])
def test_what_peers_put_into_the_store_of_a_snapshot_that_was_given_up_goes_once_it_cannot_be_begun_again(
    tmp_path: Path, saved: list[int], stays: bool
):
    snapshots, marks = complete(tmp_path / "snapshots", saved)
    part = tmp_path / "store/home/0001-00000006" / stored_name(0, HASHES[0])
    part.parent.mkdir(parents=True)
    part.touch()
    history = replace(beginning("u"), snapshots=tuple(marks), dropped=(Dropped(1, 6, complete=False),))
    told = list[Notice]()
    led, store = Led(history=lambda: history, tell=told.append, fail=fail), (tmp_path / "store").as_uri()
    upkeep = Upkeep(led, snapshots, Copies(store, "home"))

    async def settle() -> None:
        upkeep.settle()
        await upkeep.end()

    asyncio.run(settle())
    assert part.exists() == stays
    assert not [notice for notice in told if isinstance(notice, CopyFailed)]


def test_a_slow_store_gets_a_whole_copy_although_the_snapshot_is_dropped_meanwhile(tmp_path: Path):
    snapshots, marks = complete(tmp_path / "snapshots", [3, 6, 9])
    copies, told = Copies((tmp_path / "store").as_uri(), "home"), list[Notice]()
    history: History = replace(beginning("u"), snapshots=tuple(marks[:2]))
    upkeep = Upkeep(Led(history=lambda: history, tell=told.append, fail=fail), snapshots, copies)
    copying, settled = threading.Event(), threading.Event()
    reading = snapshots.reading

    async def settle() -> None:
        nonlocal history
        upkeep.settle()
        await asyncio.to_thread(copying.wait, 10)
        history = replace(
            beginning("u"), snapshots=tuple(marks[2:]), dropped=(Dropped(1, 3, True), Dropped(1, 6, True))
        )
        await asyncio.to_thread(snapshots.settle, lambda: history)
        settled.set()
        upkeep.settle()
        await upkeep.end()

    class Slowly:
        """It stops in the middle of the first copy."""

        def __init__(self, folder: Path):
            self._reading, self._folder = reading(folder), folder

        def __enter__(self) -> bool:
            here = self._reading.__enter__()
            if not copying.is_set():
                assert self._folder.name == "0001-00000006", "the newest first"
                copying.set()
                assert settled.wait(PATIENCE)
            return here

        def __exit__(self, *error: Any) -> None:
            self._reading.__exit__(*error)
            if self._folder.name == "0001-00000006":
                assert (tmp_path / "store/home/0001-00000006/snapshot.json").exists()

    snapshots.reading = Slowly  # type: ignore[assignment,method-assign]
    asyncio.run(settle())
    assert not any(isinstance(notice, CopyFailed) for notice in told)
    assert names(tmp_path / "snapshots") == ["0001-00000009"]
    assert names(tmp_path / "store/home") == ["0001-00000009"], "the old ones went"


def test_a_copy_that_fails_holds_up_neither_the_others_nor_deletions(tmp_path: Path):
    snapshots, marks = complete(tmp_path / "snapshots", [3, 6, 9])
    copies, told = Copies((tmp_path / "store").as_uri(), "home"), list[Notice]()
    copies.bring_up_to_date(snapshots.folders(marks[:1]), [], snapshots.reading)
    (tmp_path / "store/home/0001-00000009").touch()  # where a folder belongs
    history = replace(beginning("u"), snapshots=tuple(marks[1:]), dropped=(Dropped(1, 3, True),))
    kept(Upkeep(Led(history=lambda: history, tell=told.append, fail=fail), snapshots, copies))
    assert any(isinstance(notice, CopyFailed) for notice in told)
    assert names(tmp_path / "store/home") == ["0001-00000006", "0001-00000009"]
    assert (tmp_path / "store/home/0001-00000006/snapshot.json").exists()
