"""Snapshots, disks and links that fail: real processes, real files; the weights are the reference's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from exporting import logits_of
from scene import a_spec
from test_pipeline import reference_of
from tiers import first

from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import export
from protomodels_cli.wire.pb.pmtrain_pb2 import PeerStatus

pytestmark = pytest.mark.waiting

FAULTS = {  # and the snapshot that is given up then
    "a full disk": ({"kind": "full_disk_once"}, 3),
    "a part that is spoilt before it is handed in": ({"kind": "spoils_its_part", "step": 6}, 6),
}


@pytest.mark.parametrize(("fault", "given_up"), FAULTS.values(), ids=FAULTS)
def test_what_needs_nobody_to_go(scene, fault, given_up):
    s = scene(a_spec())
    s.start(3, fault)
    summary = s.ends_well()
    assert summary["steps_redone"] == 0
    assert given_up in [row["step"] for row in s.records("GaveUp")]
    assert given_up not in [row["step"] for row in s.records("Saved")]


BREAKS = [
    pytest.param("lose_way", 7, id="and cannot be opened again but through the relay"),
    pytest.param("cut_link", 7, id="in a step"),
    pytest.param("cut_link", 6, id="in the first step with a new U"),
]


@pytest.mark.parametrize(("kind", "step"), first(1, BREAKS))
def test_a_link_that_breaks_costs_no_microbatch(scene, kind, step):
    """What the stream lost is sent again over the next one: nothing is computed twice."""
    s = scene(a_spec())
    s.start(3, {"kind": kind, "step": step})
    summary = s.ends_well()
    assert (summary["steps_redone"], summary["generations"]) == (0, 1)
    computed = [(m["stage"], m["computed"]) for m in s.marks(kind) if "computed" in m]
    microbatches = range(s.spec.batch.microbatches)
    assert sorted(computed) == [(stage, microbatch) for stage in range(3) for microbatch in microbatches]
    assert any(sum(moved.values()) for moved in summary["relayed_bytes"]) is (kind == "lose_way")


def test_bytes_that_a_relay_changes_are_not_used(scene):
    s = scene(a_spec())
    s.start(3, coordinator_fault={"kind": "damage_bytes", "after": 50_000})
    assert s.ends_well()["steps_redone"] == 0


def test_nothing_waits_for_a_slow_disk_but_what_is_written_to_it(scene):
    s = scene(a_spec())
    slow = {"kind": "slow_disk", "seconds": 1.5}  # five times for each snapshot, against three steps
    s.start(3, slow, coordinator_fault=slow)
    summary = s.ends_well()
    assert summary["steps_redone"] == 0
    assert s.events("snapshot_skipped"), "steps went on while a snapshot was being written"


@pytest.mark.parametrize(
    ("where", "how"),
    first(
        2,
        [
            ("peer", "truncated"),
            ("coordinator", "flipped"),
            ("peer", "flipped"),
            ("coordinator", "truncated"),
            ("coordinator", "unreadable"),
        ],
    ),
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
    s.damage(path, how)
    s.kill(victim)
    summary = s.ends_well()
    assert bool(s.events("snapshot_unusable", step=6)) == (where == "coordinator")
    assert summary["lineage"] >= 2


def exported(place: str | Path, out: Path) -> tuple[int, str]:
    """To `out`: of which step, and with which weights."""
    with open_source(place) as source:
        return source.step, export(source, out).weights_sha256


@pytest.mark.full
def test_a_damaged_snapshot_is_brought_back_from_its_copy(scene, tmp_path):
    """A spare that fetched it ahead would not even notice; this one has not. The model is exported while the run goes
    on, and after it: with the reference's weights, from the run directory and from the store."""
    import transformers

    s = scene(a_spec(copy_to=(tmp_path / "store").as_uri()))
    s.start(4, {"kind": "slow", "seconds": 0.05})
    s.wait_for(lambda: list(tmp_path.glob("store/*/0001-00000006/snapshot.json")), "no copy of step 6")
    s.wait_for_step(7)
    assert exported(s.run_dir, tmp_path / "meanwhile")[0] < s.spec.steps
    s.damage(s.run_dir / "snapshots" / "0001-00000006" / "stage-1.safetensors", "truncated")
    s.kill(s.holder(1))
    summary = s.ends_well()
    assert s.events("part_restored", stage=1, step=6)
    assert summary["steps_redone"] < 6, "the snapshot of step 6 was used"
    assert {p.name for p in tmp_path.glob("store/*/[0-9]*")} == {p.name for p in (s.run_dir / "snapshots").iterdir()}
    ids = torch.arange(32).view(2, 16)
    right = logits_of(reference_of(s.spec)[0], ids)
    for place in (s.run_dir, (tmp_path / "store").as_uri()):
        assert exported(place, tmp_path / "out") == (s.spec.steps, summary["weights_sha256"])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        with torch.no_grad():
            assert (theirs(ids).logits - right).abs().max() <= 1e-4
        shutil.rmtree(tmp_path / "out")


@pytest.mark.full
def test_a_warm_spare_has_every_part_before_it_is_asked(scene):
    s = scene(a_spec(warm_spares=True, interval=6))
    s.start(4, {"kind": "slow", "seconds": 0.1})

    def spares() -> list[int]:
        return [int(p.name.removeprefix("peer-")) for p in s.status().peers if p.state == PeerStatus.SPARE]

    def fetched() -> bool:
        names = [path.name[:13] for path in s.run_dir.glob(f"p{spare}/*/parts/*.safetensors")]
        return any(names.count(name) == 3 for name in names)

    s.wait_for_step(1)
    [spare] = s.wait_for(spares, "nobody is left over")
    s.wait_for(fetched, "not fetched")
    whole = list((s.run_dir / "snapshots").glob("*/stage-1.safetensors"))
    assert whole
    for part in whole:
        part.unlink()  # whoever had to fetch it would have to go back to the beginning
    s.kill(s.holder(1))
    s.ends_well()
    assert not s.events("snapshot_unusable")
