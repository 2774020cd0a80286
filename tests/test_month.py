"""The month in virtual time: its homes, its books, the bound on lost time, and policies that break it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from protomodels_cli import timeouts
from protomodels_cli.bench import month_report, month_runs
from protomodels_cli.bench.homes import DAY, HOUR, Home, Rates, homes
from protomodels_cli.bench.month import Month
from protomodels_cli.bench.month_books import MOST, Books
from protomodels_cli.bench.month_size import SPEC, Size, Steps, size_of
from protomodels_cli.coordinator import absences, assigning, reasons, recovery
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.snapshots import policy
from protomodels_cli.cost.saving import LEAST_SLOWED

STEPS = Steps(249.8, 251.5, (14.0, *[28.0] * 14, 14.0))  # about what the forecast says
SIZE = size_of(STEPS)
HOURLY = size_of(STEPS, every="1h")  # what is lost then depends on when
NOON, SENT, LATER, EVENING = 7400.0, 8200.0, 11_200.0, 6 * HOUR  # SENT: all parts but the last stage's are here
LEAST_GOODPUT = 0.6  # of six hours with one fault
Scene = dict[int, Home]


def test_the_month_is_of_the_shape_that_the_config_trains():
    config = yaml.safe_load((Path(__file__).parent.parent / "configs" / "llama-8b.yaml").read_text())
    for section in ("batch", "compute", "tokenizer"):
        assert SPEC[section] == config[section]
    for name in ("layers", "width", "heads", "kv_heads", "context"):
        assert SPEC["model"][name] == config["model"][name]


def test_homes_meet_the_same_faults_whatever_follows():
    found, longer = (list(homes(7, 18, days * DAY, Rates())) for days in (30, 60))
    assert {home.name for home in found} <= {home.name for home in longer}
    assert all(b in of[home.name] for of in [{h.name: h.blips for h in longer}] for home in found for b in home.blips)


def test_homes_blink_and_die_as_often_as_they_should():
    found = list(homes(5, 400, 30 * DAY, Rates()))
    lasts = [seconds for home in found for _, seconds in home.blips]
    assert statistics.median(lasts) == pytest.approx(20.0, rel=0.05)
    assert sum(seconds > 600 for seconds in lasts) / len(lasts) == pytest.approx(0.1, rel=0.05)
    dead = [home for home in found if home.dies < math.inf]
    assert len(dead) == pytest.approx(400 * 30 * 24 / 121, rel=0.05)
    assert sum(home.closed for home in dead) / len(dead) == pytest.approx(0.5, rel=0.1)
    assert len(lasts) == pytest.approx(400 * 60, rel=0.05)
    assert len(list(homes(5, 400, 30 * DAY, Rates().times(3)))) == pytest.approx(400 + 400 * 720 / 41, rel=0.05)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_day_adds_up_and_keeps_the_bound(seed: int):
    month = month_runs.a_month(SIZE, seed, DAY)
    books = month.run()
    assert sum(books.spent.values()) == pytest.approx(DAY)
    assert len(books.steps) == month.state.history.step
    assert (books.redone, books.rollbacks) == (month.state.history.redone, month.state.history.rollbacks)
    assert sum(incident.lost for incident in books.incidents) <= DAY - books.spent["useful"]
    assert len(books.incidents) > 10
    assert keeps_the_bound(books)
    assert month.dismissed == 0
    assert books.goodput > LEAST_GOODPUT


def test_without_faults_all_but_snapshots_is_useful():
    books = play({}, size=SIZE)
    assert not books.incidents
    assert books.spent["waiting"] == books.spent["redoing"] == 0
    assert books.spent["restoring"] == pytest.approx(max(SIZE.build) + 2, abs=1), "built once, and linked"
    assert 0.98 < books.goodput < 1


def home(stage: int, *blips: tuple[float, float], dies: float = math.inf, closed: bool = False) -> Scene:
    """To the first holder of this stage that happens, and to nobody else anything."""
    return {stage: Home(f"p{stage}.0", 0.0, blips, dies, closed)}


def play(scene: Scene, patient: bool = True, size: Size = HOURLY) -> Books:
    return _month(scene, patient, size).run()


def _month(scene: Scene, patient: bool, size: Size) -> Month:
    everybody = {i: Home(f"p{i}.0", 0.0, (), math.inf, closed=False) for i in range(18)}
    return Month(size, list((everybody | scene).values()), EVENING, patient)


def is_good(books: Books) -> bool:
    """What the policy must keep, and every broken one breaks."""
    return books.goodput > LEAST_GOODPUT and keeps_the_bound(books)


def keeps_the_bound(books: Books) -> bool:
    return all(incident.times <= MOST for incident in books.incidents)


SHORT = home(3, (NOON, 60.0))
LONG = home(3, (NOON, 600.0))
SILENT = home(3, dies=NOON)
CLOSED = home(3, dies=NOON, closed=True)
LATE = home(3, dies=LATER, closed=True)
UPLOADING = home(15, dies=SENT, closed=True)  # its part of the snapshot that was begun is not here
UPLOADED = home(3, dies=SENT, closed=True)  # … is here
AGAIN = home(3, (NOON / 2, 900.0), dies=NOON)


@pytest.mark.parametrize("scene", [SHORT, LONG, SILENT, CLOSED, LATE, UPLOADING, UPLOADED, AGAIN])
def test_the_policy_keeps_the_bound(scene: Scene):
    books = play(scene)
    assert is_good(books)
    assert len(books.incidents) == 1 + (scene is AGAIN)


def test_a_snapshot_that_is_nearly_complete_is_worth_waiting_for():
    """Whose part is missing cannot upload it any more."""
    books, without = play(UPLOADED), play(UPLOADING)
    assert (books.rollbacks, without.rollbacks) == (1, 1)
    assert books.redone < 5 < 15 < without.redone


@pytest.mark.parametrize("slower", [0.0, 0.5])
def test_how_much_an_upload_slows_steps_is_measured(slower: float):
    size = replace(SIZE, step_beside=(1 + slower) * SIZE.step, copy=0.0)
    month = _month({}, True, size)
    month.run()
    assert month.state.saving.pace.slowed == pytest.approx(max(LEAST_SLOWED, slower))


def test_what_a_blip_costs_is_the_blip():
    books = play(SHORT)
    assert books.rollbacks == 0
    assert books.spent["redoing"] == 0
    assert books.spent["waiting"] == pytest.approx(61.0), "and a second to register"


def constantly(answer: object) -> Callable[..., object]:
    return lambda *_: answer


def longer(patience: Callable[[recovery.Costs, float], float]) -> Callable[..., float]:
    return lambda costs, away, longest, lease: max(2 * lease, patience(costs, longest))


def to_the_first(moves: Moves, _: Mark, why: reasons.Rollback, answered: int = 0) -> None:
    ROLL_BACK(moves, moves.state.history.snapshots[0], why, answered)


ROLL_BACK = assigning.roll_back
BROKEN = {
    "nobody is replaced": (SILENT, recovery, "decide", constantly("wait")),
    "everybody is replaced at once": (SHORT, recovery, "decide", constantly("replace")),
    "the snapshot's age is ignored": (LONG, recovery, "patience", longer(lambda *_: 0.0)),
    "two hours of patience": (SILENT, recovery, "patience", constantly(7200.0)),
    "ten times the patience": (SILENT, recovery, "patience", longer(lambda costs, _: 10 * costs.redo)),
    "more patience after each absence": (
        AGAIN,
        recovery,
        "patience",
        longer(lambda costs, longest: max(costs.redo, 8 * longest)),
    ),
    "who comes back is not believed": (SHORT, assigning, "_is_in_its_generation", constantly(False)),
    "the dead are waited for": (CLOSED, timeouts, "SESSION_RECONNECT", 7200.0),
    "nobody is found to take over": (SILENT, absences, "_successor", constantly(None)),
    "the oldest snapshot is taken": (LATE, assigning, "roll_back", to_the_first),
    "what was begun is waited for without end": (
        UPLOADING,
        absences,
        "_is_nearly_saved",
        lambda state, *_: bool(state.history.pending),
    ),
    "no snapshot is ever due": (LATE, policy, "seconds_between", constantly(math.inf)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_policy_is_caught(name: str, monkeypatch: pytest.MonkeyPatch):
    scene, where, what, instead = BROKEN[name]
    monkeypatch.setattr(where, what, instead)
    if name == "who comes back is not believed":
        monkeypatch.setattr(assigning, "is_current", constantly(False))
    assert not is_good(play(scene))


def test_the_policies_of_before_are_caught():
    """A rollback at the first silence, before anything is fetched."""
    assert not is_good(play(SHORT, patient=False))


@pytest.mark.full
def test_months_are_compared_and_drawn(tmp_path: Path):
    found = month_runs.measure(runs=1, rates=3.0, months=1, seed=20, days=0.25, predicted=STEPS)
    assert [(row["policies"], row["rates"]) for row in found["months"]] == [
        ("now", 1.0),
        ("before", 1.0),
        ("now", 3.0),
        ("before", 3.0),
    ]
    assert found["months"][0]["goodput"] > found["months"][1]["goodput"]
    assert all(sum(row["spent"].values()) == pytest.approx(1) for row in found["months"])
    assert (found["bound"]["runs"], found["bound"]["beyond"]) == (1, 0)
    assert 58 < found["setting"]["snapshot_bytes"] / 2**30 < 59
    json.dumps(found, allow_nan=False)
    assert month_report.in_words(found)
    month_report.plot(found, tmp_path / "month.png")
    assert (tmp_path / "month.png").stat().st_size > 10_000
