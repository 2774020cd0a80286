"""`bench swarm`: its arithmetic on rows by hand, and a small swarm against a real coordinator."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from protomodels_cli.bench.swarm import commit_latencies, spread
from protomodels_cli.cli.main import app


def test_a_commit_takes_from_the_last_report_of_all_to_the_last_turn_of_all():
    rows = [
        # generation, step, reports, the last, turns, the last: of three stages in two processes
        [1, 7, 2, 10.0, 2, 11.5],
        [1, 7, 1, 10.5, 1, 11.0],
        [2, 7, 3, 20.0, 3, 20.25],  # again, in another generation
        [2, 8, 3, 30.0, 2, 30.5],  # one of them vanished
        [2, 9, 2, 40.0, 2, 40.5],
        [1, 6, 3, 9.0, 3, 9.5],  # before the time that counts
    ]
    assert commit_latencies(rows, 3, since=10.0) == [1.0, 0.25]


@pytest.mark.parametrize(
    ("seconds", "p50", "p99"), [([3.0], 3.0, 3.0), ([2.0, 1.0], 1.0, 2.0), (list(range(200, 0, -1)), 100, 198)]
)
def test_percentiles_are_values_that_were_measured(seconds, p50, p99):
    assert spread(seconds) == {"count": len(seconds), "p50": p50, "p99": p99}


def test_light_peers_need_no_torch():
    command = "import sys, protomodels_cli.bench.swarm_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0


@pytest.mark.full
def test_a_small_swarm_is_measured_beside_a_few(tmp_path):
    path = tmp_path / "swarm.json"
    options = ["--clients", "20", "--stages", "4", "--minutes", "0.08", "--churn", "900", "--step-seconds", "0.05"]
    done = CliRunner().invoke(app, ["bench", "swarm", *options, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    few, many = found["rows"]
    assert [(row["clients"], row["stages"]) for row in (few, many)] == [(8, 4), (20, 4)]
    for row in (few, many):
        assert row["steps"] == row["commit_s"]["count"] > 0
        assert 0 < row["commit_s"]["p50"] <= row["commit_s"]["p99"]
        assert row["join_s"]["p50"] > 0
        assert row["status_s"]["count"] >= 1
        assert row["coordinator_cores"] > 0
        assert 50e6 < row["coordinator_memory_bytes"] < found["coordinator_memory_bound_bytes"]
        assert not row["lost"]
        assert not row["failed"]
    assert (few["join_s"]["count"], few["leaves"]) == (8, {})
    left = sum(many["leaves"].values())
    assert left
    assert 20 < many["join_s"]["count"] <= 20 + left
    assert many["commit_p99_above_s"] == many["commit_s"]["p99"] - few["commit_s"]["p99"]
