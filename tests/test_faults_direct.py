"""Snapshots that never touch the coordinator's disk: real processes, a real S3 server that checks every signature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pool import wait_for_link
from s3 import S3, URL
from s3_server_key import SECRET
from scene import Scene, a_spec
from test_direct import s3  # noqa: F401
from test_faults_snapshots import exported
from test_faults_store import Burning
from told import events, peer_events

from protomodels_cli.spec import RunSpec

pytestmark = pytest.mark.waiting


@pytest.fixture
def burning(s3: S3, scene: Callable[[RunSpec], Scene], tmp_path: Path, unused_port: int):  # noqa: F811
    """The coordinator's process has the credentials, and those of the peers, which are older, do not."""
    s = scene(a_spec(copy_to=URL))
    s.pool.coordinator.kill()
    yield Burning(s, tmp_path, unused_port, slow={"kind": "slow", "seconds": 0.2})
    s.pool.coordinator.kill()


@pytest.mark.full
def test_a_run_goes_on_from_parts_that_peers_put_into_the_store_themselves(burning: Burning, s3: S3):  # noqa: F811
    """The coordinator, its disk and a peer are lost at once. Another machine leads on, and a new peer takes the stage:
    its part has never been at either coordinator."""
    s, folder = burning.s, burning.folder
    s.wait_for(lambda: s3.has("/0001-00000006/snapshot.json"), "no snapshot of step 6 in the store")
    assert not list(s.run_dir.glob("snapshots/0001-00000006/*.safetensors"))
    lost = s.holder(1)
    s.kill(lost)
    burning.burn()
    with burning.continued() as leader:
        link = wait_for_link(folder / "new")
        s.pool.peers[3].start(kind="join", link=link, name="peer-3", dir=str(folder / "p3"))
        s.peers = [i for i in (*s.peers, 3) if i != lost]
        burning.ends_well(leader)
    [told] = events(folder / "new", "took_over")
    # Stage 1's, unless holders changed on a busy machine and one of them still had that.
    fetched = [path for path in s3.presigned("GET") if f"-{told['snapshot']:08d}/stage-" in path]
    assert fetched, ("the new peer has it from the store", told, s3.presigned("GET"), peer_events(folder / "p3"))
    assert not list((folder / "new").glob(f"snapshots/*-{told['snapshot']:08d}/*.safetensors"))
    for i in s.peers:
        assert {row["to_store"] for row in peer_events(folder / f"p{i}", "part_uploaded")} == {True}
    assert exported(folder / "new", folder / "out")[0] == s.spec.steps
    logs = [folder / "new" / name for name in ("coordinator.log", "events.jsonl", "metrics.jsonl")]
    for file in [*logs, *folder.glob("p[0-9]/**/*")]:
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
