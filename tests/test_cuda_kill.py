"""A peer on a CUDA device is killed and comes back: losses stay in the band of a run to which nothing happened."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import make_spec
from waiting import wait_for

from protomodels_cli.bench.gpu_run import steps_in
from protomodels_cli.codecs import Carrier
from protomodels_cli.data.prepare import prepare
from protomodels_cli.launch.local import local_run
from protomodels_cli.model.reference import Reference

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bf16", 1e-2)])
def test_losses_after_a_kill_follow_the_reference(tmp_path: Path, dtype, tolerance):
    spec = make_spec(
        stages=4,
        steps=120,
        optimizer={"name": "adamw", "lr": 1e-3},
        compute={"dtype": dtype},
        snapshots={"interval": 10},
    )
    reference = Reference(spec, prepare(spec), Carrier(spec), torch.device("cuda:0"))
    right = [row["loss"] for row in reference.train() if row["event"] == "step"]
    with local_run(spec, tmp_path / "run", device="cuda:0") as running:
        metrics = running.folder / "metrics.jsonl"
        wait_for(lambda: len(steps_in(metrics)) >= 25, "step 25 did not come", seconds=120)
        running.peers["peer-2"].kill()
        running.peers["peer-2"].wait()
        assert len(steps_in(metrics)) < spec.steps, "the run was over before the peer was killed"
        running.start_again("peer-2")
        try:
            assert running.coordinator.wait(timeout=240) == 0
        except subprocess.TimeoutExpired:
            pytest.fail((running.folder / "logs" / "coordinator.log").read_text()[-2000:])
    rows = {row["step"]: row["loss"] for row in steps_in(metrics)}  # a step that was redone: as it was the last time
    summary = json.loads((running.folder / "summary.json").read_text())
    worst = max(abs(rows[step] - loss) / loss for step, loss in enumerate(right, start=1))
    print(f"{dtype}: {summary['steps_redone']} steps redone, largest relative difference of a loss: {worst:.2e}")
    assert summary["generations"] >= 2
    assert worst < tolerance
