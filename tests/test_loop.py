"""The coordinator's event loop: what it shows, and what it never waits for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import corpus_of, make_spec
from door_tools import HERE, in_loop
from marks import marks
from pool import Pool, wait_for_link
from told import events, wait_for_event
from waiting import until

from protomodels_cli.coordinator.coordinator import Coordinator
from protomodels_cli.coordinator.history import Record
from protomodels_cli.coordinator.run_dir import RunDir, open_run_dir, owner_secret
from protomodels_cli.errors import UserError
from protomodels_cli.wire.client import operator
from protomodels_cli.wire.join_link import JoinLink


class Disk:
    """The journal's, which takes its time: every write waits until it may go on, and may fail then."""

    def __init__(self, coordinator: Coordinator):
        self._append = coordinator._journal.append
        self.asked, self.may_go_on, self.error = threading.Event(), threading.Event(), None
        coordinator._journal.append = self.append  # type: ignore[method-assign]

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go_on.set()

    def append(self, records: Iterable[Record], now: float) -> None:
        self.asked.set()
        self.may_go_on.wait()
        if self.error is not None:
            raise self.error
        self._append(records, now)


@contextlib.asynccontextmanager
async def led(folder: RunDir) -> AsyncIterator[tuple[Coordinator, asyncio.Task[int], JoinLink]]:
    """A coordinator in this process, which others reach as they reach any."""
    coordinator, links = Coordinator(corpus_of(folder.spec), folder, lambda text: None), list[str]()
    leading = asyncio.create_task(coordinator.run(HERE, HERE, 0, links.append))
    try:
        await until(lambda: links or leading.done(), "no link")
        yield coordinator, leading, JoinLink.parse(links[0])
    finally:
        coordinator._interrupted.set()
        with contextlib.suppress(UserError):
            await leading
        folder.lock.close()


@in_loop
async def test_what_is_decided_shows_once_it_is_on_disk(tmp_path: Path):
    folder = open_run_dir(tmp_path / "run", make_spec(stages=2), tmp_path)
    async with led(folder) as (coordinator, _, link), operator(link, folder.owner) as owner:
        with Disk(coordinator) as disk:
            await owner.control("PAUSE")
            await until(disk.asked.is_set, "nothing was journalled")
            before = await owner.status()
            assert before.reason_kind == ""
            assert coordinator.state.history == coordinator._journal.history
        await until(lambda: coordinator.state.history.paused is not None, "it was never paused")
        assert coordinator.state.history == coordinator._journal.history
        assert events(folder.path, "paused")


@in_loop
async def test_what_the_disk_did_not_take_was_never_decided(tmp_path: Path):
    folder = open_run_dir(tmp_path / "run", make_spec(stages=2), tmp_path)
    async with led(folder) as (coordinator, leading, link), operator(link, folder.owner) as owner:
        with Disk(coordinator) as disk:
            disk.error = OSError(errno.ENOSPC, "No space left on device")
            await owner.control("PAUSE")
            await until(disk.asked.is_set, "nothing was journalled")
        with pytest.raises(UserError) as ended:
            await leading
        assert ended.value.kind == "disk_full"
        assert coordinator.state.history.paused is None
        assert not events(folder.path, "paused")


def test_the_event_loop_waits_for_no_file(pool: Pool):
    """A run with all that touches files: parts that arrive, snapshots and bases that are dropped, tokens, a kick."""
    spec = make_spec(
        stages=2,
        steps=16,
        snapshots={"interval": 2, "keep": 1},
        subspace={"sync_interval": 4, "update": {"interval": 4, "window": 2, "delay": 1}},
    )
    run_dir = pool.start(spec, [{}], fault={"kind": "files_in_the_loop"})
    link = JoinLink.parse(wait_for_link(run_dir))

    async def invite() -> JoinLink:
        async with operator(link, owner_secret(run_dir)) as owner:
            unused, used = await owner.create_token(1, 0), await owner.create_token(1, 0)
            await owner.revoke_token(unused.id)
            await owner.kick("p00000000")  # nobody, which changes the run's own token
            return replace(link, token=used.token)

    wait_for_event(run_dir, "peer_joined")
    invited = asyncio.run(invite())
    pool.peers[1].start(kind="join", link=str(invited), name="guest", dir=str(run_dir / "guest"))
    assert [peer.result()["exit"] for peer in pool.peers[:2]] == [0, 0]
    assert pool.coordinator.result()["exit"] == 0
    assert (run_dir / "summary.json").exists()
    assert len(list((run_dir / "snapshots").iterdir())) == 1, "the others were dropped"
    found = [row for row in marks(pool.coordinator.marks, "files_in_the_loop") if row["call"]]
    assert not found, "\n".join(f"{row['call']} {row['path']} in {' '.join(row['stack'])}" for row in found)
