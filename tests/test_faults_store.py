"""The coordinator's machine burns in the middle of a run: real processes, a folder as the store.

Its directory is deleted with it; another one is started from the store at another port, with nothing but the URL and
the key. The peers are told nothing and find it by themselves, and the weights are the reference's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scene import Scene, a_spec, expected
from starting import Started, begin
from test_run import ends
from told import events

from protomodels_cli.coordinator.deposit import JOURNALS, JournalCopy, read_sealed
from protomodels_cli.coordinator.seal import read_key
from protomodels_cli.coordinator.snapshots.copies import connect
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.worker.join import KEPT_LINK

pytestmark = pytest.mark.waiting

SLOW = {"kind": "slow", "seconds": 0.05}


class Burning:
    """A run of three peers whose coordinator has a store. One peer's link names no other address: it is told."""

    def __init__(self, s: Scene, tmp_path: Path, port: int, slow: dict[str, Any] = SLOW):
        self.s, self.folder, self.port = s, tmp_path, port
        s.run_dir = s.pool.start(s.spec, [], also_at=[port])
        s.peers = [0, 1, 2]
        link = JoinLink.parse((s.run_dir / "link").read_text())
        assert link.others == (("127.0.0.1", port),)
        for i in s.peers:
            mine = replace(link, others=()) if i == 0 else link
            job = {"name": f"peer-{i}", "dir": str(tmp_path / f"p{i}"), "fault": slow}
            s.pool.peers[i].start(kind="join", link=str(mine), **job)
        self.key = tmp_path / "kept.key"
        s.wait_for((s.run_dir / "store.key").exists, "no key")
        shutil.copy(s.run_dir / "store.key", self.key)

    @property
    def there(self) -> Path:
        [run] = (self.folder / "store").iterdir()
        return run

    def copied(self) -> int:
        """The last step that the store knows of."""
        files, root = connect(self.there.as_uri())
        found = [read_sealed(files, f"{root}/{name}", read_key(self.key), JournalCopy) for name in JOURNALS]
        return max((copy.history.step for copy in found if copy is not None), default=0)

    def secrets(self) -> list[str]:
        """As they are in the run directory: the authority's key, the token and all others, and the key of the store."""
        private = json.loads((self.folder / "new/private.json").read_text())
        authority = (self.folder / "new/ca/ca.key").read_text().splitlines()[1]
        return [authority, *(private[name] for name in ("token", "owner", "peers_key")), self.key.read_text().strip()]

    def burn(self) -> None:
        self.s.kill_coordinator()
        shutil.rmtree(self.s.run_dir)

    @contextmanager
    def continued(self) -> Iterator[Started]:
        options = ["--key", self.key, "--run-dir", self.folder / "new", "--host", "127.0.0.1", "--port", self.port]
        leader = begin("coordinator", "--from", self.s.spec.snapshots.copy_to, *options, cwd=self.folder)
        try:
            yield leader
        finally:
            leader.kill()
            leader.wait()

    def ends_well(self, leader: Started) -> dict[str, Any]:
        code, said = ends(leader)
        assert code == 0, said
        assert [self.s.pool.peers[i].result()["exit"] for i in self.s.peers] == [0, 0, 0]
        summary: dict[str, Any] = json.loads((self.folder / "new/summary.json").read_text())
        assert summary["weights_sha256"] == expected(self.s.spec)
        return summary


@pytest.fixture
def burning(scene: Callable[[RunSpec], Scene], tmp_path: Path, unused_port: int) -> Burning:
    return Burning(scene(a_spec(copy_to=(tmp_path / "store").as_uri())), tmp_path, unused_port)


def test_a_coordinator_and_its_disk_are_lost_in_mid_run(burning: Burning):
    s = burning.s
    s.wait_for(lambda: list(burning.folder.glob("store/*/0001-00000006/snapshot.json")), "no copy of step 6")
    s.wait_for_step(7)
    burning.burn()
    with burning.continued() as leader:
        summary = burning.ends_well(leader)
    assert summary["steps"] == s.spec.steps
    [told] = events(burning.folder / "new", "took_over")
    assert told["snapshot"] >= 6
    assert summary["steps_redone"] <= 6
    logs = [burning.folder / "new" / name for name in ("coordinator.log", "events.jsonl", "metrics.jsonl")]
    for file in [*logs, *(burning.folder / "store").rglob("*"), *burning.folder.glob("p[0-9]/**/*")]:
        if file.is_file() and file.name != KEPT_LINK:  # a peer's own join link, which nobody else can read
            assert not [secret for secret in burning.secrets() if secret.encode() in file.read_bytes()], file


@pytest.mark.full
def test_what_peers_have_in_memory_counts_where_the_store_knew_of_the_last_step(burning: Burning):
    """A peer that stands still makes sure of that. No step is redone, though there is no snapshot of it."""
    s = burning.s
    s.wait_for_step(4)
    stopped = s.pool.peers[1].pid
    os.kill(stopped, signal.SIGSTOP)
    s.wait_for(lambda: burning.copied() == s.status().step, "the journal was not copied")
    at = s.status().step
    burning.burn()
    os.kill(stopped, signal.SIGCONT)
    with burning.continued() as leader:
        summary = burning.ends_well(leader)
    [told] = events(burning.folder / "new", "took_over")
    assert (told["step"], told["in_memory"]) == (at, True)
    assert (summary["steps_redone"], summary["lineage"]) == (0, 1)
