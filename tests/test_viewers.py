"""What the benchmark of viewers makes of steps and phases, and its load against a real server."""

from __future__ import annotations

import subprocess
import sys

import pytest
from starting import ROOT
from test_page import ask, page_at

from protomodels_cli.bench.viewers import compared
from protomodels_cli.observe.page.address import default_place


def test_steps_count_for_the_phase_that_they_are_wholly_within():
    phases = [
        {"kind": k, "began": 10.0 * i, "ended": 10.0 * i + 10} for i, k in enumerate(("nobody", "elsewhere", "page"))
    ]
    steps = [{"at": at, "seconds": s} for at, s in ((5, 1.0), (11, 2.0), (15, 1.0), (19, 1.0), (25, 1.04), (31, 2.0))]
    found = compared(steps, phases)
    assert [found[k]["steps"] for k in ("nobody", "elsewhere", "page")] == [1, 2, 1]
    assert found["slowed"] == pytest.approx(0.04)
    assert found["within"]
    assert compared(steps[:3], phases)["slowed"] is None


def test_many_viewers_watch_a_page(tmp_path):
    where = default_place()
    with page_at(where, tmp_path):
        command = [sys.executable, "-m", "protomodels_cli.bench.viewers_load", "watch", where.url, "120"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert process.stdout.readline().strip() == "120"
            assert b"\npmtrain_page_viewers 120.0\n" in ask(where.port, "/metrics")[2]
        finally:
            process.kill()
            process.wait()
