"""What a status looks like on a terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from protomodels_cli.observe import progress
from protomodels_cli.observe.fields import fields
from protomodels_cli.observe.view import picture
from protomodels_cli.quantities import duration
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

RUNNING = pb.RunStatus.RUNNING


def lines(status: pb.RunStatus) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(picture(status))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_wait_has_a_line_of_its_own_below_the_bar():
    status = pb.RunStatus(name="home", phase=RUNNING, step=3, steps=9, waiting_for="stage 1 (attic)", waiting_s=9.0)
    shown = lines(status)
    assert shown[0].split()[:6] == ["home:", "running", "|", "step", "3/9", "(33.3"]
    assert set(shown[1]) <= set("━╸╺ ")
    assert shown[2].endswith("stage 1 (attic)")


def test_a_short_wait_of_a_running_run_is_not_worth_a_word():
    status = pb.RunStatus(name="home", phase=RUNNING, step=3, steps=9, waiting_for="stage 1 (attic)", waiting_s=1.0)
    assert not any("waiting" in line for line in lines(status))


def test_how_far_it_is_saved_and_what_was_redone_is_said():
    status = pb.RunStatus(phase=RUNNING, step=30, steps=90, snapshot_step=20, rollbacks=2, steps_redone=7)
    last = lines(status)[-1]
    assert re.findall(r"\d+", last) == ["20", "2", "7"]


def test_what_a_crash_would_cost_is_the_last_line():
    status = pb.RunStatus(phase=RUNNING, step=30, steps=90, snapshot_step=20, crash_redo_s=20.0, crash_restore_s=3.0)
    last = lines(status)[-1]
    assert re.findall(r"\d+", last) == ["23", "10", "20", "3"]
    found = fields(status)
    assert (found["crash_redo_s"], found["crash_restore_s"]) == (20.0, 3.0)
    assert "crash_redo_s" not in fields(pb.RunStatus(phase=RUNNING, steps=90)), "nothing was measured"


def test_a_paused_run_says_why_and_what_to_do():
    status = pb.RunStatus(name="home", phase=pb.RunStatus.PAUSED, step=3, steps=9, reason="REASON", waiting_for="WAITS")
    shown = lines(status)
    assert "REASON" in shown
    assert not any("WAITS" in line for line in shown)


def test_trouble_with_a_link_is_shown_until_it_is_cured():
    assert "TROUBLE" in lines(pb.RunStatus(phase=pb.RunStatus.ASSIGNING, steps=9, trouble="TROUBLE"))


def test_programs_read_enums_in_lower_case_and_a_stage_where_there_is_one():
    holds = pb.PeerStatus(peer="p1", state=pb.PeerStatus.HOLDING, stage=0)
    stage = pb.StageStatus(state=pb.StageStatus.LOST, holders=[pb.Holder(peer="p2")])
    spare = pb.PeerStatus(peer="p3", state=pb.PeerStatus.SPARE)
    found = fields(pb.RunStatus(phase=pb.RunStatus.WAITING_FOR_PEERS, peers=[holds, spare], stages=[stage]))
    assert found["phase"] == "waiting_for_peers"
    assert [(p["state"], p.get("stage")) for p in found["peers"]] == [("holding", 0), ("spare", None)]
    assert [(s["state"], s["holders"]) for s in found["stages"]] == [("lost", [{"peer": "p2", "name": ""}])]


def test_a_phase_that_only_a_newer_coordinator_has():
    newer = pb.RunStatus(steps=9, phase=99)  # type: ignore[arg-type]
    assert lines(newer)
    assert fields(newer)["phase"] == "99"


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
