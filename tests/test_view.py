"""What a status looks like on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

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
    status = pb.RunStatus(name="home", phase="running", step=30, steps=90, snapshot_step=20, lineage=3, steps_redone=7)
    assert lines(status)[-1] == "saved up to step 20 | went back 2 ×, 7 steps redone"
