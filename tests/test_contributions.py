"""Who did how much of a run: sums over rows of metrics, which a restart does not lose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import make_spec
from machine_bench import Bench, to_step

from protomodels_cli.coordinator import contributions
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.contributions import EVERY, MOST_NAMES, OTHERS, Contribution, Contributions
from protomodels_cli.export.card import _work
from protomodels_cli.export.source import Facts
from protomodels_cli.observe.metrics import JsonLines


def a_row(step: int, *holders: str) -> dict[str, Any]:
    sent = {"forward_bytes": [10] * len(holders), "backward_bytes": [1] * len(holders)}
    return {"event": "step", "step": step, "lineage": 1, "tokens": 64, "seconds": 0.5, "holders": [*holders]} | {
        "stages": sent
    }


def test_sums_are_by_name_and_the_largest_comes_first():
    found = Contributions()
    for holders in (("a", "b"), ("a", "c"), ("a", "a")):  # two of one name are one
        found.add(a_row(1, *holders))
    assert found.sums() == {
        "a": Contribution(4, 256, 2.0, 44),
        "b": Contribution(1, 64, 0.5, 11),
        "c": Contribution(1, 64, 0.5, 11),
    }
    assert list(found.sums()) == ["a", "b", "c"]


def test_rows_that_only_a_journal_was_left_of_count_for_nothing():
    found = Contributions()
    found.add({"event": "step", "step": 1, "lineage": 1, "tokens": 64, "seconds": None})
    assert found.sums() == {}


def test_names_without_room_are_counted_together():
    found = Contributions()
    for i in range(MOST_NAMES + 5):
        found.add(a_row(i, f"n{i}"))
    sums = found.sums()
    assert len(sums) == MOST_NAMES + 1
    assert list(sums)[-1] == OTHERS
    assert sums[OTHERS].steps == 5


def test_sums_outlast_a_restart_and_little_is_read_for_that(tmp_path: Path, monkeypatch):
    """Rows with the sums stand between those of steps; half a row at the end, and a damaged one, are passed over."""
    path, known = tmp_path / "metrics.jsonl", Contributions()
    with JsonLines(path) as rows:
        for step in range(1, 2 * EVERY + 8):
            rows.write(a_row(step, "a", "b" if step % 3 else "c"))
            if known.add(a_row(step, "a", "b" if step % 3 else "c")):
                rows.write(known.row(1, step))
        rows.write({"event": "step", "holders": ["x", "y"], "stages": {"forward_bytes": [1]}})
    with path.open("a") as file:
        file.write('{"event":"step","holders":["z"')
    looked_at, real = 0, contributions.rows_from_last

    def counted(file: Path):
        nonlocal looked_at
        for row in real(file):
            looked_at += 1
            yield row

    monkeypatch.setattr(contributions, "rows_from_last", counted)
    found = contributions.read(path)
    assert found.sums() == known.sums()
    assert looked_at < EVERY
    assert contributions.read(tmp_path / "nothing").sums() == {}


def test_a_coordinator_that_is_often_started_again_writes_sums_all_the_same(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as rows:
        for step in range(EVERY - 1):
            rows.write(a_row(step, "a"))
    assert contributions.read(path).add(a_row(EVERY, "a"))


def test_rows_of_steps_name_those_that_computed_them():
    b = Bench(make_spec(stages=2, steps=99))
    b.join(0, 1, 2)
    to_step(b, 3)
    b.lose("p0")
    to_step(b, b.state.history.step + 2)
    rows = [c.row for c in b.commands if isinstance(c, ev.WriteRow) and c.row["event"] == "step"]
    assert rows[0]["holders"] == ["name-0", "name-1"]
    assert set(rows[-1]["holders"]) == {"name-1", "name-2"}


def test_the_model_card_names_them_and_what_they_wrote_into_their_names_does_nothing():
    work = {
        "desk": Contribution(1200, 3_000_000, 7200.0, 1 << 30),
        "`x`|\n<b>": Contribution(1),
        OTHERS: Contribution(2),
    }
    source = SimpleNamespace(facts=Facts(work=work))
    rows = [line for line in _work(source).splitlines() if line.startswith("| `") or "others" in line]  # type: ignore[arg-type]
    assert [row.count("|") for row in rows] == [6, 6, 6]
    assert [cell.strip() for cell in rows[0].split("|")[1:5]] == ["`desk`", "1,200", "3 M", "2.0"]
    assert rows[1].startswith("| `x   <b>` |")
