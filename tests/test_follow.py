"""Followers of metrics.jsonl: every row once, whenever they are killed; and the dashboard asks for names that exist."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heavy import heavy
from starting import ROOT, pmtrain
from test_page import a_status
from waiting import wait_for

from protomodels_cli.errors import UserError
from protomodels_cli.observe.follow.following import Points, Position, follow, load, points_of, save
from protomodels_cli.observe.prometheus import OfStatus
from protomodels_cli.observe.tail import Tail
from protomodels_cli.worker.figures import Figures


def step_row(step: int, lineage: int = 1, **more: Any) -> dict[str, Any]:
    row = {"event": "step", "lineage": lineage, "step": step, "loss": 8.0 - step / 1000, "lr": 1e-3, "grad_norm": 1.0}
    stages = {"compute_s": [0.1, 0.2], "forward_bytes": [66, 0]}
    return {**row, "applied": True, "tokens": 64, "seconds": 0.5, "stages": stages, "at": 1e9 + step, **more}


def append(path: Path, *rows: dict[str, Any], half: bool = False) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + ('{"event":"st' if half else ""))


class Kept:
    """A follower that keeps what it is given."""

    def __init__(self) -> None:
        self.got, self.position = list[Points](), Position()

    def begin(self) -> Position:
        return self.position

    def write(self, points: Points) -> None:
        self.got.append(points)

    def commit(self, position: Position) -> None:
        self.position = position

    def close(self) -> None:
        pass


def test_whole_lines_are_rows_and_half_a_line_is_not_there_yet(tmp_path):
    tail = Tail(tmp_path / "m.jsonl")
    assert list(tail.rows()) == []
    append(tail.path, step_row(1), half=True)
    assert [row["step"] for row in tail.rows()] == [1]
    assert tail.waiting == len('{"event":"st')
    with tail.path.open("a") as file:
        file.write('ep"}\nnot json\n')
    append(tail.path, step_row(2))
    assert [row.get("step") for row in tail.rows()] == [None, 2]
    assert tail.waiting == 0


def test_rows_are_passed_on_once_from_where_a_follower_left_off(tmp_path):
    path, kept = tmp_path / "m.jsonl", Kept()
    append(path, step_row(1), {"event": "switch", "step": 1, "version": 0, "at": 1.0}, step_row(2), half=True)
    assert follow(path, [kept], lambda: True) == 3
    assert [(p.row, p.step) for p in kept.got] == [(1, 1), (3, 2)]
    kept.position = Position(kept.position.rows)  # as where only rows are known
    path.write_bytes(path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1])
    append(path, {"event": "eval", "lineage": 1, "step": 2, "loss": 7.5, "at": 5.0})
    assert follow(path, [kept], lambda: True) == 1
    assert (kept.got[-1].row, dict(kept.got[-1].values)) == (4, {"held-out/loss": 7.5})
    path.write_text("")
    with pytest.raises(UserError) as e:
        follow(path, [kept], lambda: True)
    assert e.value.kind == "metrics_replaced"


def test_what_a_row_has_to_draw():
    found = points_of(1, step_row(7))
    assert found is not None
    assert found.values["train/tokens_per_s"] == 128
    assert found.values["stage 1/compute_s"] == 0.2
    assert points_of(1, step_row(7, loss="nan")).values.keys() >= {"train/lr"}  # type: ignore[union-attr]
    assert points_of(1, {"event": "switch", "step": 1, "at": 1.0}) is None


def test_a_place_that_follows_another_run_is_left_alone(tmp_path):
    save(tmp_path / "s.json", "mine", Position(2, 30), length=5)
    assert load(tmp_path / "s.json", "mine") == {"run": "mine", "rows": 2, "offset": 30, "length": 5}
    with pytest.raises(UserError) as e:
        load(tmp_path / "s.json", "other")
    assert e.value.kind == "follows_another"


# What follows a growing file in a process of its own, to be killed.
PROGRAM = """
import sys
from pathlib import Path
from protomodels_cli.observe.follow import following
from protomodels_cli.observe.follow.tensorboard import TensorBoard
following.COMMIT_ROWS = 7
here = Path(sys.argv[1])
board = TensorBoard(here / "board", "run")
following.follow(here / "m.jsonl", [board], (here / "over").exists, 0.01)
board.close()
"""


def test_tensorboard_has_every_point_once_though_its_follower_is_killed(tmp_path):
    heavy("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, events = tmp_path / "m.jsonl", tmp_path / "board" / "events.out.tfevents.pmtrain"
    path_of_code = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, env = [sys.executable, "-c", PROGRAM, str(tmp_path)], {**os.environ, "PYTHONPATH": path_of_code}
    append(path, *(step_row(step) for step in range(1, 41)))
    process = subprocess.Popen(command, env=env)
    wait_for(lambda: (tmp_path / "board" / "pmtrain.json").exists(), "nothing was put down")
    append(path, *(step_row(step) for step in range(41, 61)))
    process.send_signal(signal.SIGKILL)
    process.wait()
    with events.open("ab") as file:
        file.write(b"half of an event")  # that the kill left
    append(path, *(step_row(step, lineage=2) for step in range(51, 71)), half=True)
    (tmp_path / "over").touch()
    subprocess.run(command, env=env, check=True, timeout=120)
    found = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0})
    found.Reload()
    assert [s.step for s in found.Scalars("train/loss")] == list(range(1, 71)), "a rollback's steps are there once"
    before = events.read_bytes()
    subprocess.run(command, env=env, check=True, timeout=120)
    assert events.read_bytes() == before


def test_wandb_is_told_each_row_once(tmp_path, monkeypatch):
    wandb = heavy("wandb")
    from protomodels_cli.observe.follow.wandb import WeightsAndBiases

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[int] = []
    monkeypatch.setattr(wandb.Run, "log", lambda self, values, step: logged.append(step))
    path = tmp_path / "m.jsonl"
    for steps in (range(1, 4), range(4, 6)):
        append(path, *map(step_row, steps))
        there = WeightsAndBiases("project", "tiny", "tiny-1234", tmp_path)
        follow(path, [there], lambda: True)
        there.close()
    assert logged == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["follow", "."], 2), (["follow", ".", "--tensorboard", "board"], 3), (["follow", "absent", "--wandb", "x"], 3)],
)
def test_mistakes(tmp_path, arguments, code):
    done = pmtrain(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 2


def test_the_dashboard_asks_for_metrics_that_exist():
    status = a_status()
    status.loss, status.eval_loss, status.eta_s, status.crash_redo_s, status.crash_restore_s = 5.0, 5.0, 1.0, 1.0, 1.0
    figures = Figures(loss=1.0)
    families = [*OfStatus(lambda: status, 0).collect(), *figures.collect()]
    exist = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads((ROOT / "configs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for text in asked for name in re.findall(r"pmtrain_\w+", text)}
    assert len(names) >= 15
    assert names <= exist
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    used = {label for text in asked for label in re.findall(r"[{,](\w+)=", text)}
    assert used - {"job"} <= labels
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
