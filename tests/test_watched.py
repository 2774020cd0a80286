"""What peers and onlookers are told of a run that is paused, led on by another coordinator, and ended."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest
from conftest import make_spec
from starting import begin, pmtrain
from test_run import coordinator, ends
from told import peer_events, status_of
from waiting import wait_for

from protomodels_cli.coordinator.stopped import from_journal
from protomodels_cli.errors import UserError


def of_peer(folder: Path, name: str, kind: str) -> list[dict]:
    """From the peer's own events, in a folder that it shares."""
    [own] = [file for file in folder.glob("*/events*.jsonl") if f'"name":"{name}"' in file.read_text()]
    return [row for row in map(json.loads, own.read_text().splitlines()) if row["kind"] == kind]


@pytest.mark.full
def test_a_pause_reaches_every_peer_and_each_has_a_log_of_its_own(tmp_path):
    """Two peers and a spare share a folder; the spare joins while the run is paused. What they did outlives the
    coordinator."""
    spec = make_spec(name="home", stages=2, steps=100_000, snapshots={"interval": 50})
    shared = tmp_path / "shared"
    with coordinator(spec, tmp_path) as (leader, link):
        join = ("join", link, "--device", "cpu", "--dir", shared, "--name")
        peers = [begin(*join, name, cwd=tmp_path) for name in ("alpha", "beta")]
        wait_for(lambda: len(peer_events(shared, "step_decided")) >= 2, "no steps")
        assert pmtrain("pause", "run", cwd=tmp_path).returncode == 0
        for name in ("alpha", "beta"):
            wait_for(lambda name=name: of_peer(shared, name, "paused"), "it was not told of the pause")
        [told] = of_peer(shared, "beta", "paused")
        assert (told["reason"], told["stage"] in (0, 1)) == ("by_owner", True)
        wait_for(lambda: status_of(tmp_path / "run").tokens_per_s == 0, "it still shows a speed")
        assert status_of(tmp_path / "run").reason.endswith(" run`")
        peers.append(begin(*join, "gamma", cwd=tmp_path))
        wait_for(lambda: len(peer_events(shared, "paused")) == 3, "who comes later was not told")
        assert pmtrain("resume", "run", cwd=tmp_path).returncode == 0
        wait_for(lambda: len(peer_events(shared, "resumed")) == 3, "nobody was told that it goes on")
        [row, *_] = of_peer(shared, "alpha", "step_decided")[-1:]
        assert row["done"] > 0
        assert row["sent"] > 0
        leader.kill()
        before = {c.name: c for c in from_journal(tmp_path / "run").contributions}
        assert set(before) == {"alpha", "beta"}
        leader = begin("coordinator", "--resume", "--run-dir", "run", "--host", "127.0.0.1", "--no-page", cwd=tmp_path)
        wait_for(lambda: (found := status_of_or_none(tmp_path / "run")) and found.step > before["alpha"].steps, "stuck")
        after = status_of(tmp_path / "run")
        assert {c.name for c in after.contributions} == {"alpha", "beta"}
        for c in after.contributions:
            assert c.steps > before[c.name].steps
            assert c.tokens == c.steps * spec.batch.size * spec.model.context
            assert c.sent_bytes > before[c.name].sent_bytes > 0
        assert 0 < after.started < time.time() - 1
        assert pmtrain("stop", "run", cwd=tmp_path).returncode == 0
        for process in (*peers, leader):
            code, said = ends(process)
            assert code == 0, said
    logs = {name: log for name in ("alpha", "beta", "gamma") for log in [shown(shared, name)]}
    for name, log in logs.items():
        assert f" as {name} (" in log
        assert not [other for other in logs if other != name and f" as {other} (" in log]


def status_of_or_none(run_dir: Path):
    with contextlib.suppress(UserError):
        return status_of(run_dir)


def shown(shared: Path, name: str) -> str:
    [folder] = (path for path in shared.iterdir() if path.is_dir())
    done = pmtrain("logs", folder, "--peer", name)
    assert done.returncode == 0, done.stderr
    return done.stdout
