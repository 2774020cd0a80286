"""What a status looks like on a terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from protomodels_cli.observe import progress
from protomodels_cli.observe.view import picture
from protomodels_cli.quantities import duration
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def lines(status: pb.RunStatus) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(picture(status))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_wait_has_a_line_of_its_own_below_the_bar():
    status = pb.RunStatus(name="home", phase="running", step=3, steps=9, waiting_for="stage 1 (attic)", waiting_s=9.0)
    shown = lines(status)
    assert shown[0].split()[:6] == ["home:", "running", "|", "step", "3/9", "(33.3"]
    assert set(shown[1]) <= set("━╸╺ ")
    assert shown[2].endswith("stage 1 (attic)")


def test_a_short_wait_of_a_running_run_is_not_worth_a_word():
    status = pb.RunStatus(name="home", phase="running", step=3, steps=9, waiting_for="stage 1 (attic)", waiting_s=1.0)
    assert not any("waiting" in line for line in lines(status))


def test_how_far_it_is_saved_and_what_was_redone_is_said():
    status = pb.RunStatus(phase="running", step=30, steps=90, snapshot_step=20, rollbacks=2, steps_redone=7)
    last = lines(status)[-1]
    assert re.findall(r"\d+", last) == ["20", "2", "7"]


def test_a_paused_run_says_why_and_what_to_do():
    status = pb.RunStatus(name="home", phase="paused", step=3, steps=9, reason="REASON", waiting_for="WAITS")
    shown = lines(status)
    assert "REASON" in shown
    assert not any("WAITS" in line for line in shown)


def a_step(step: int) -> dict[str, Any]:
    row = {"loss": 4.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 1024, "applied": True}
    return {"event": "step", "step": step, **row}


def test_the_line_of_a_step_survives_going_back_behind_the_first_one_shown(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown, found = progress.Progress(300), []
    for step in (230, 231, 229, 1, 300):
        now[0] += 3.0
        found.append(shown.line(a_step(step)))
    assert [line.split(" ")[1].split("/")[0] for line in found] == ["230", "231", "229", "", "300"]
    assert found[2].endswith(f"eta {duration(71 * 3)}")
    assert found[4].endswith(f"eta {duration(0)}")


def test_two_steps_at_one_moment_of_a_coarse_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    assert "step 1/9" in progress.Progress(9).line(a_step(1))
