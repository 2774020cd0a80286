"""What a status looks like on a terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from protomodels_cli.observe import progress
from protomodels_cli.observe.fields import fields
from protomodels_cli.observe.view import peer_table, picture, spares
from protomodels_cli.protocol import throughput
from protomodels_cli.quantities import duration
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

RUNNING = pb.RunStatus.RUNNING


def lines(status: pb.RunStatus, width: int = 140) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(picture(status))
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
    stage = pb.StageStatus(state=pb.StageStatus.LOST, holders=[pb.Holder(peer="p2", presence=pb.KICKED)])
    spare = pb.PeerStatus(peer="p3", state=pb.PeerStatus.SPARE)
    found = fields(pb.RunStatus(phase=pb.RunStatus.WAITING_FOR_PEERS, peers=[holds, spare], stages=[stage]))
    assert found["phase"] == "waiting_for_peers"
    assert [(p["state"], p.get("stage")) for p in found["peers"]] == [("holding", 0), ("spare", None)]
    assert [(s["state"], s["holders"]) for s in found["stages"]] == [
        ("lost", [{"peer": "p2", "name": "", "presence": "kicked"}])
    ]


def test_a_stage_without_a_holder_says_how_that_went_and_a_run_at_rest_shows_no_shares():
    here = pb.StageStatus(state=pb.StageStatus.WAITING, holders=[pb.Holder(name="attic", presence=pb.HERE)], stage=1)
    vacant = pb.StageStatus(state=pb.StageStatus.LOST, holders=[pb.Holder(name="desk", presence=pb.KICKED)])
    gone = [pb.GonePeer(name="desk", how=pb.KICKED, gone_s=90.0)]
    shown = lines(pb.RunStatus(phase=pb.RunStatus.WAITING, step=3, steps=9, stages=[vacant, here], gone=gone))
    [first, second] = [line.split() for line in shown if line.split()[:1] in (["0"], ["1"])]
    assert first[2:7] == ["desk", "kicked", "–", "–", "–"]
    assert second[2:4] == ["attic", "waiting"]
    assert shown[-1].split()[:3] == ["gone:", "desk", "(kicked"]


def test_the_memory_of_a_process_is_not_called_the_stages():
    stage = pb.StageStatus(stage=0, peak_memory=1 << 30, forecast_memory=1 << 20, process_memory=True)
    for whole, name in ((True, "process"), (False, "memory")):
        stage.process_memory = whole
        head = next(line for line in lines(pb.RunStatus(phase=RUNNING, steps=9, stages=[stage])) if "layers" in line)
        assert re.split(r"  +", head)[-2].strip() == name


def test_columns_for_which_there_is_no_room_are_named():
    stages = [pb.StageStatus(stage=i, peak_memory=1 << 30, path="loopback", round_trip_s=0.001) for i in range(2)]
    status = pb.RunStatus(phase=RUNNING, steps=9, stages=stages)
    wide = lines(status, 140)
    shown = lines(status, 78)
    assert max(map(len, shown)) <= 78
    head = next(line for line in shown if "compute" in line)
    named = " ".join(shown)
    for column in ("memory", "stage needs", "vs bf16", "B/token ←"):
        assert column not in head
        assert column in named
    assert len(shown) > len(wide)


def test_who_did_how_much_has_a_line_and_few_names():
    status = pb.RunStatus(phase=RUNNING, steps=9)
    for name in ("attic", "desk", *(f"n{i}" for i in range(8))):
        status.contributions.add(name=name, steps=12, seconds=90.0, sent_bytes=3 << 20)
    shown = " ".join(lines(status))
    assert [word in shown for word in ("attic 12", "desk 12", "n3 12", "n4 12")] == [True, True, True, False]
    assert shown.strip().endswith("and 4 more")


def test_peers_that_are_gone_are_listed_with_the_others():
    status = pb.RunStatus(steps=9, gone=[pb.GonePeer(name="desk", how=pb.LEFT, gone_s=90.0)])
    for peers in ([], [pb.PeerStatus(peer="p1", name="attic", state=pb.PeerStatus.SPARE)]):
        status.peers.extend(peers)
        out = io.StringIO()
        Console(file=out, width=140).print(peer_table(status))
        assert out.getvalue().splitlines()[-1].split()[:3] == ["gone:", "desk", "(left"]


def test_that_there_is_no_spare_has_a_line():
    with_spare, without = (lines(pb.RunStatus(phase=RUNNING, steps=9, no_spare=no_spare)) for no_spare in (False, True))
    assert len(without) == len(with_spare) + 1


def test_who_rests_has_a_line_and_is_no_spare():
    peers = [pb.PeerStatus(peer="p1", name=name, state=pb.PeerStatus.RESTING) for name in ("attic", "desk")]
    rests = pb.RunStatus(phase=RUNNING, steps=9, peers=peers)
    [line] = set(lines(rests)) - set(lines(pb.RunStatus(phase=RUNNING, steps=9)))
    assert "attic" in line
    assert "desk" in line
    assert spares(rests) == ""


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


def test_the_coordinators_line_has_the_speed_and_the_time_that_its_status_has(monkeypatch: pytest.MonkeyPatch):
    line = progress.Progress(300).line(a_step(100), 512.0)
    assert line is not None
    assert line.endswith(f"512 tok/s | eta {duration(200 * 1024 / 512)}")
    unknown = progress.Progress(300).line(a_step(100), 0.0)
    assert unknown is not None
    assert "eta" not in unknown


def test_the_speed_is_of_the_last_steps_from_where_the_first_of_them_began():
    moments: tuple[float, ...] = ()
    assert throughput.tokens_per_s(moments, 10) == 0.0
    moments = throughput.with_step(moments, 100.0, 102.0)
    assert throughput.tokens_per_s(moments, 10) == 5.0
    moments = throughput.with_step(moments, 0.0, 104.0)
    assert throughput.tokens_per_s(moments, 10) == 5.0
    for step in range(200):
        moments = throughput.with_step(moments, 0.0, 105.0 + step)
    assert (len(moments), throughput.tokens_per_s(moments, 10)) == (throughput.KEPT, 10.0), "of the last ones alone"
    assert throughput.seconds_left(3, 10, 5.0) == 6.0
    assert throughput.seconds_left(3, 10, 0.0) is None


def test_two_steps_at_one_moment_of_a_coarse_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    assert "step 1/9" in progress.Progress(9).line(a_step(1))
