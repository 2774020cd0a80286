"""Whatever happens, the weights are those of a run to which nothing happened: real processes, real kills."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_spec
from pool import Pool
from test_pipeline import reference_of

from protomodels_cli.bench.cable import Cable, cable
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.link import JoinLink
from protomodels_cli.wire.operator import operator

WIRES = {
    "fp32": {},
    "int8": {"forward": "int8+ef21", "backward": "int8+ef21"},
}


def a_spec(wire: str = "fp32", limits: dict[str, Any] | None = None, **snapshots: Any) -> RunSpec:
    return make_spec(
        stages=3,
        steps=12,
        subspace={"sync_interval": 4, "update": {"interval": 4, "window": 2, "delay": 1}},
        snapshots={"interval": 3} | snapshots,
        limits={"lease_seconds": 2.0} | (limits or {}),
        wire=WIRES[wire],
        eval={"interval": 5},
    )


class Scene:
    """A run in the pool's processes, and what is done to it."""

    def __init__(self, pool: Pool, folder: Path, spec: RunSpec):
        self.pool, self.folder, self.spec = pool, folder, spec
        self.marks = 0

    def fail_at(self, phase: str, stage: int = 0, step: int = 0, signal: str = "SIGKILL") -> dict[str, Any]:
        """A fault for every process that could come to that point; the first that does gets the signal."""
        self.mark = self.folder / f"failed-{self.marks}"
        self.marks += 1
        return {
            "kind": "fail_at",
            "phase": phase,
            "stage": stage,
            "step": step,
            "signal": signal,
            "once": str(self.mark),
        }

    def start(
        self, peers: int, fault: dict[str, Any] | None = None, coordinator_fault: dict[str, Any] | None = None
    ) -> None:
        """`fault` is every peer's."""
        self.run_dir = self.pool.start(self.spec, [{"fault": fault or {}}] * peers, fault=coordinator_fault or {})
        self.peers = list(range(peers))

    def join(self, i: int, through: Cable | None = None) -> None:
        """A peer that has just been killed, or a new one: its files are where they were."""
        link = JoinLink.parse((self.run_dir / "link").read_text())
        link = through.through(link) if through else link
        self.pool.peers[i].start(kind="join", link=str(link), name=f"peer-{i}", dir=str(self.run_dir / f"p{i}"))
        if i not in self.peers:
            self.peers.append(i)

    def dead(self) -> list[int]:
        """Peers whose process is gone, once one is."""
        return [i for i in self.peers if self.pool.peers[i].gone]

    def wait_for(self, what: Callable[[], Any], why: str, seconds: float = 60) -> Any:
        until = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < until, f"{why}; {self.events()[-600:]}"
            time.sleep(0.02)
        return found

    def wait_for_mark(self) -> None:
        self.wait_for(self.mark.exists, "the fault did not come")

    def events(self) -> str:
        file = self.run_dir / "events.jsonl"
        return file.read_text() if file.exists() else ""

    def status(self) -> Any:
        async def ask() -> Any:
            async with operator(JoinLink.parse((self.run_dir / "link").read_text())) as coordinator:
                return await coordinator.status()

        return asyncio.run(ask())

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.status().step >= step, f"step {step} did not come")

    def holder(self, stage: int) -> int:
        """Which of the peers holds it."""
        return int(self.status().stages[stage].name.removeprefix("peer-"))

    def restart_coordinator(self) -> None:
        self.pool.coordinator.start(
            kind="coordinator", spec=self.spec.model_dump(mode="json"), run_dir=str(self.run_dir)
        )

    def ends_well(self) -> dict[str, Any]:
        try:
            led = self.pool.coordinator.result()
        except AssertionError:
            for i in self.peers:
                self.pool.peers[i].tell_what_it_does()
            raise
        assert led["exit"] == 0, led
        for i in self.peers:
            if not self.pool.peers[i].gone:
                ended = self.pool.peers[i].result()
                assert ended["exit"] == 0, ended
        summary = json.loads((self.run_dir / "summary.json").read_text())
        assert summary["weights_sha256"] == expected(self.spec)
        return summary


_expected: dict[str, str] = {}


def expected(spec: RunSpec) -> str:
    key = spec.sha256()
    if key not in _expected:
        _expected[key] = reference_of(spec)[0].weights_sha256()
    return _expected[key]


@pytest.fixture
def scene(pool: Pool, tmp_path: Path) -> Callable[..., Scene]:
    return lambda spec: Scene(pool, tmp_path, spec)


KILLS = [
    pytest.param("fp32", "forward", 0, 5, id="first"),
    pytest.param("fp32", "backward", 1, 7, id="middle"),
    pytest.param("fp32", "decided", 2, 8, id="last"),
    pytest.param("int8", "prepared", 1, 8, id="middle, prepared, int8"),
    pytest.param("fp32", "saving", 1, 6, id="while it saves"),
    pytest.param("fp32", "basis", 1, 1, id="between the broadcast of U and its switch"),
    pytest.param("int8", "switch", 0, 6, id="at the switch, int8"),
    pytest.param("fp32", "prepared", 2, 6, id="behind a switch, which is undone"),
]


@pytest.mark.parametrize(("wire", "phase", "stage", "step"), KILLS)
def test_a_killed_peer_is_replaced_by_a_spare(scene, wire, phase, stage, step):
    s = scene(a_spec(wire))
    s.start(4, s.fail_at(phase, stage, step))
    s.wait_for_mark()
    summary = s.ends_well()
    assert len(s.dead()) == 1
    assert summary["generations"] >= 2


def test_a_peer_whose_device_hangs_goes_and_says_so(scene):
    """Its process lives, and so do its beats."""
    s = scene(a_spec())
    mark = str(s.folder / "hangs")
    s.start(4, {"kind": "stuck_device", "stage": 1, "step": 8, "once": mark, "patience": 2.0})
    said = s.wait_for(lambda: re.search(r"peer-(\d) \(\w+\) left: the device has been", s.events()), "nobody noticed")
    gone = int(said[1])
    ended = s.pool.peers[gone].result()
    assert ended["exit"] == 3
    assert "the device has been at one piece of work for 2 s" in ended["error"]
    s.peers.remove(gone)
    assert s.ends_well()["generations"] >= 2


def test_a_step_that_stands_still_is_begun_again(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "lose_message", "step": 8, "once": str(s.folder / "lost")}, {"kind": "impatient", "seconds": 3})
    s.wait_for(lambda: "to finish step 8" in s.events(), "nobody noticed")
    summary = s.ends_well()
    assert summary["generations"] >= 2
    assert summary["steps_redone"] == 0, "all that was decided is in memory"


def test_ids_that_come_out_of_order_are_asked_for_again(scene):
    s = scene(a_spec())
    s.start(3, coordinator_fault={"kind": "feed_out_of_order", "step": 8, "once": str(s.folder / "reversed")})
    s.wait_for(lambda: "the coordinator sent a message that cannot be" in s.events(), "nobody noticed")
    assert s.ends_well()["steps_redone"] == 0


def test_two_adjacent_peers_are_killed_at_once(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(7)
    two = [s.holder(0), s.holder(1)]
    for i in two:
        s.pool.peers[i].kill()
    for i in two:
        s.join(i)
    assert s.ends_well()["generations"] >= 2


def test_all_peers_are_killed(scene):
    s = scene(a_spec("int8"))
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(5)
    for i in s.peers:
        s.pool.peers[i].kill()
    for i in s.peers:
        s.join(i)
    assert s.ends_well()["generations"] >= 2


@pytest.mark.parametrize("phase", ["grant", "ready", "commit", "adopted", "ended"])
def test_the_coordinator_is_killed(scene, phase):
    """Its peers keep what they have: nothing is redone."""
    s = scene(a_spec("int8" if phase == "commit" else "fp32"))
    peers = 4 if phase == "ended" else 3  # a spare has to hear of the end too
    s.start(peers, coordinator_fault=s.fail_at(phase, 0, {"adopted": 4, "ended": -1}.get(phase, 7)))
    s.wait_for_mark()
    s.restart_coordinator()
    summary = s.ends_well()
    assert summary["steps_redone"] == 0
    rows = [json.loads(line) for line in (s.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 13)), "each has its row"
    assert all(math.isfinite(row["loss"]) for row in steps)
    took = sum(row["seconds"] or 0.0 for row in steps)
    assert summary["seconds"] >= took - 0.1, "of the whole run, not since the coordinator was started again"


def test_the_coordinator_and_a_peer_are_killed_together(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(7)
    victim = s.holder(1)
    s.pool.coordinator.kill()
    s.pool.peers[victim].kill()
    s.restart_coordinator()
    s.join(victim)
    assert s.ends_well()["generations"] >= 2


def test_everything_is_killed(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(8)
    s.pool.coordinator.kill()
    for i in s.peers:
        s.pool.peers[i].kill()
    s.restart_coordinator()
    for i in s.peers:
        s.join(i)
    assert s.ends_well()["generations"] >= 2


@pytest.mark.parametrize("spares", [0, 1])
def test_a_peer_that_is_stopped_for_longer_than_its_lease(scene, spares):
    """Without a spare it goes on with what it has; with one it comes back to find its place taken."""
    s = scene(a_spec())
    s.start(3 + spares, s.fail_at("forward", 1, 8, "SIGSTOP"))
    s.wait_for_mark()
    s.wait_for(lambda: "not heard of" in s.events(), "nobody noticed")
    if spares:
        s.wait_for(lambda: "steps are redone" in s.events() or "step is redone" in s.events(), "nobody took over")
    for i in s.peers:
        os.kill(s.pool.peers[i].pid, signal.SIGCONT)
    assert s.ends_well()["lineage"] == 1 + spares


@pytest.mark.parametrize("spares", [0, 1])
def test_a_peer_whose_line_is_cut_for_longer_than_its_lease(scene, spares):
    """As with one that is stopped; but it goes on computing, and finds out by itself."""
    s = scene(a_spec())
    with cable() as line:
        s.start(2, {"kind": "slow", "seconds": 0.15})
        s.join(2, through=line)
        s.wait_for_step(1)
        if spares:
            s.join(3)
            s.wait_for(lambda: len(s.status().peers) == 4, "the spare did not come")
        line.cut()
        s.wait_for(lambda: "not heard of" in s.events(), "nobody noticed")
        if spares:
            s.wait_for(lambda: "generation 2" in s.events(), "nobody took over")
        line.mend()
        assert s.ends_well()["generations"] >= 2


def test_a_peer_that_is_silent_for_less_than_its_lease_is_not_missed(scene):
    s = scene(a_spec(limits={"lease_seconds": 5.0}))
    s.start(4, s.fail_at("forward", 1, 8, "SIGSTOP"))
    s.wait_for_mark()
    time.sleep(2.0)
    for i in s.peers:
        os.kill(s.pool.peers[i].pid, signal.SIGCONT)
    assert s.ends_well()["generations"] == 1


def test_a_spare_that_cannot_build_the_stage_says_so_and_the_next_is_asked(scene, tmp_path):
    s = scene(a_spec())
    s.start(4, {"kind": "cannot_build", "once": str(tmp_path / "no-memory")})
    s.wait_for_step(7)
    victim = s.holder(1)
    s.pool.peers[victim].kill()
    s.wait_for((tmp_path / "no-memory").exists, "nobody took over")
    s.wait_for(lambda: "ran out of memory" in s.events(), "it did not say so")
    s.join(victim)
    led = s.pool.coordinator.result()
    assert led["exit"] == 0, led
    results = [s.pool.peers[i].result() for i in s.peers]
    [failed] = [r for r in results if r["exit"]]
    assert "close other programs" in failed["error"]
    assert json.loads((s.run_dir / "summary.json").read_text())["weights_sha256"] == expected(s.spec)


FAULTS = {
    "a cut link": {"kind": "cut_link", "step": 7},
    "a cut link in the first step with a new U": {"kind": "cut_link", "step": 6},
    "a damaged frame": {"kind": "damage_frame", "step": 7},
    "a full disk": {"kind": "full_disk_once"},
    "a part that is spoilt before it is handed in": {"kind": "spoils_its_part", "step": 6},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_needs_nobody_to_go(scene, fault):
    s = scene(a_spec())
    s.start(3, FAULTS[fault])
    assert s.ends_well()["steps_redone"] == 0


def test_nothing_waits_for_a_slow_disk_but_what_is_written_to_it(scene):
    s = scene(a_spec())
    slow = {"kind": "slow_disk", "seconds": 1.0}  # five times for each snapshot, against three steps
    s.start(3, slow, coordinator_fault=slow)
    summary = s.ends_well()
    assert summary["steps_redone"] == 0
    assert "still on its way" in s.events(), "steps went on while a snapshot was being written"


def test_a_commit_that_does_not_reach_a_live_peer_is_told_again(scene):
    s = scene(a_spec())
    s.start(3, coordinator_fault={"kind": "lose_turn", "stage": 1, "step": 7})
    summary = s.ends_well()
    assert summary["steps_redone"] == 0
    assert "is back" in s.events()


@pytest.mark.parametrize("what", ["u", "t_fixed"])
def test_a_flipped_bit_is_found_mended_and_what_it_spoilt_is_redone(scene, what):
    s = scene(a_spec())
    s.start(3, {"kind": "flip_bit", "what": what, "after_step": 6, "once": str(s.folder / "flipped")})
    summary = s.ends_well()
    assert "used other bytes" in s.events()
    assert summary["lineage"] == 2


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("peer", "truncated"),
        ("peer", "flipped"),
        ("coordinator", "truncated"),
        ("coordinator", "flipped"),
        ("coordinator", "unreadable"),
    ],
)
def test_a_damaged_snapshot_is_not_used(scene, where, how):
    """On a peer's disk: fetched again. At the coordinator, for a peer that has no other: an older one is used."""
    s = scene(a_spec())
    s.start(4, {"kind": "slow", "seconds": 0.05})
    s.wait_for(lambda: (s.run_dir / "snapshots" / "0001-00000006").exists(), "no snapshot of step 6")
    s.wait_for_step(7)
    victim = s.holder(1)
    if where == "peer":
        survivor = s.holder(2)
        [path] = s.run_dir.glob(f"p{survivor}/*/parts/0001-00000006-stage-2.*.safetensors")
    else:
        path = s.run_dir / "snapshots" / "0001-00000006" / "stage-1.safetensors"
    content = path.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    if how == "unreadable":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content[: len(content) // 2] if how == "truncated" else flipped)
    s.pool.peers[victim].kill()
    summary = s.ends_well()
    assert ("cannot be used" in s.events()) == (where == "coordinator")
    assert summary["lineage"] >= 2


def test_a_damaged_snapshot_is_brought_back_from_its_copy(scene, tmp_path):
    """A spare that fetched it ahead would not even notice; this one has not."""
    s = scene(a_spec(copy_to=(tmp_path / "store").as_uri()))
    s.start(4, {"kind": "slow", "seconds": 0.05})
    s.wait_for(lambda: list(tmp_path.glob("store/*/0001-00000006/hashes.json")), "no copy of step 6")
    s.wait_for_step(7)
    (s.run_dir / "snapshots" / "0001-00000006" / "stage-1.safetensors").write_bytes(b"damaged")
    s.pool.peers[s.holder(1)].kill()
    summary = s.ends_well()
    assert "brought back" in s.events()
    assert summary["steps_redone"] < 6, "the snapshot of step 6 was used"
    assert {p.name for p in tmp_path.glob("store/*/*")} == {p.name for p in (s.run_dir / "snapshots").iterdir()}


def test_what_was_not_copied_before_a_kill_is_copied_after_it(scene, tmp_path):
    s = scene(a_spec(copy_to=(tmp_path / "store").as_uri()))
    s.start(3, coordinator_fault=s.fail_at("ended", 0, -1))
    s.wait_for_mark()
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    s.restart_coordinator()
    s.ends_well()
    assert {p.name for p in tmp_path.glob("store/*/*")} == {p.name for p in (s.run_dir / "snapshots").iterdir()}


def test_a_warm_spare_has_every_part_before_it_is_asked(scene):
    s = scene(a_spec(warm_spares=True, interval=6))
    s.start(4, {"kind": "slow", "seconds": 0.15})

    def spares() -> list[int]:
        return [int(p.name.removeprefix("peer-")) for p in s.status().peers if p.state == "spare"]

    def fetched() -> bool:
        names = [path.name[:13] for path in s.run_dir.glob(f"p{spare}/*/parts/*.safetensors")]
        return any(names.count(name) == 3 for name in names)

    s.wait_for_step(1)
    [spare] = s.wait_for(spares, "nobody is left over")
    s.wait_for(fetched, "not fetched")
    for part in (s.run_dir / "snapshots").glob("*/stage-1.safetensors"):
        part.unlink()  # whoever had to fetch it would have to go back to the beginning
    s.pool.peers[s.holder(1)].kill()
    s.ends_well()
    assert "cannot be used" not in s.events()


def test_bad_numbers_that_do_not_come_back_are_redone(scene, tmp_path):
    """A gradient that is not finite, once: the run returns to before it, if its spec says so."""
    s = scene(a_spec(limits={"nonfinite_steps": 1, "nonfinite_action": "return"}))
    bad = {"step": 8, "microbatch": 1, "boundary": 1, "leg": "backward"}
    s.start(3, {"kind": "poison", "once": str(tmp_path / "spoilt"), **bad})
    summary = s.ends_well()
    assert (summary["lineage"], summary["steps_redone"]) == (2, 2), "back to step 6"


def test_a_peer_that_leaves_hands_its_state_over(scene):
    s = scene(a_spec())
    s.start(4, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(5)
    os.kill(s.pool.peers[s.holder(1)].pid, signal.SIGINT)
    led = s.pool.coordinator.result()
    assert led["exit"] == 0, led
    assert sorted(s.pool.peers[i].result()["exit"] for i in s.peers) == [0, 0, 0, 130]
    summary = json.loads((s.run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == expected(s.spec)
    assert summary["steps_redone"] == 0
