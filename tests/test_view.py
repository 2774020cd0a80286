"""What a status looks like on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from protomodels_cli.observe import progress
from protomodels_cli.observe.view import picture
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def lines(status: pb.RunStatus) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(picture(status))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_wait_has_a_line_of_its_own_below_the_bar():
    status = pb.RunStatus(name="home", phase="running", step=3, steps=9, waiting_for="stage 1 (attic)", waiting_s=9.0)
    shown = lines(status)
    assert shown[0].startswith("home: running | step 3/9 (33.3 %)")
    assert set(shown[1]) <= set("━╸╺ ")
    assert shown[2] == "waiting for stage 1 (attic)"


def test_a_short_wait_of_a_running_run_is_not_worth_a_word():
    status = pb.RunStatus(name="home", phase="running", step=3, steps=9, waiting_for="stage 1 (attic)", waiting_s=1.0)
    assert not any("waiting" in line for line in lines(status))


def test_how_far_it_is_saved_and_what_was_redone_is_said():
    status = pb.RunStatus(phase="running", step=30, steps=90, snapshot_step=20, rollbacks=2, steps_redone=7)
    assert lines(status)[-1] == "saved up to step 20 | went back 2 ×, 7 steps redone"


def test_the_line_of_a_step_survives_going_back_behind_the_first_one_shown(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown, found = progress.Progress(300), []
    for step in (230, 231, 229, 1, 300):
        now[0] += 3.0
        found.append(shown.line(step, 4.0, 1e-3, 1.0, 1024, True))
    assert [line.split(" ")[1].split("/")[0] for line in found] == ["230", "231", "229", "", "300"]
    assert "eta 3m33s" in found[2], "71 steps of 3 s"
    assert "eta 0s" in found[4]


def test_two_steps_at_one_moment_of_a_coarse_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    assert "step 1/9" in progress.Progress(9).line(1, 4.0, 1e-3, 1.0, 1024, True)
