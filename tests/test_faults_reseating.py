"""A slow holder and a fast spare, in real processes: the stage changes hands, and the weights are the reference's."""

from __future__ import annotations

import json
import statistics

import pytest
from conftest import make_spec
from scene import MOVING

pytestmark = pytest.mark.waiting

STEPS, INTERVAL = 30, 5


def test_a_slow_holder_is_re_seated_at_a_snapshot_and_no_step_is_computed_twice(scene):
    s = scene(make_spec(stages=2, steps=STEPS, snapshots={"interval": INTERVAL}, subspace=MOVING))
    s.start(1, {"kind": "slow", "seconds": 1.5})
    s.join(1, fault={"kind": "slow", "seconds": 0.0})
    s.wait_for(lambda: s.events("stages_assigned"), "nobody holds a stage")
    s.join(2, fault={"kind": "slow", "seconds": 0.0})
    summary = s.ends_well()
    [begun], [done] = s.events("stage_reseating"), s.events("stage_reseated")
    assert (done["before_name"], done["name"]) == ("peer-0", "peer-2")
    assert begun["step"] % INTERVAL == 0
    assert (summary["lineage"], summary["steps_redone"], summary["generations"]) == (1, 0, 2)
    computed = [(m["stage"], m["step"], m["microbatch"]) for m in s.marks("slow") if m["leg"] == "forward"]
    microbatches = range(s.spec.batch.microbatches)
    assert sorted(computed) == [(i, step, m) for i in range(2) for step in range(1, STEPS + 1) for m in microbatches]
    rows = [json.loads(line) for line in (s.run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["seconds"] for row in rows if row["event"] == "step"}
    after = [seconds[step] for step in range(begun["step"] + 1, STEPS + 1)]
    assert statistics.median(after) < 0.75 * begun["reason"]["step_seconds"]
