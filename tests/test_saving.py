"""How often a run is saved, what that takes of a disk, and what a crash costs: pure functions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import corpus_of, make_spec
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.coordinator.coordinator import Coordinator
from protomodels_cli.coordinator.events import Tick
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.snapshots.room import RESERVE, check_room, missing_room
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.saving import (
    IN_TIME,
    LEAST_SLOWED,
    LONGEST,
    MOST_SLOWED,
    PEER_SECONDS,
    SHORTEST,
    SLOWED,
    due_after,
    forecast_saving,
    kept_bytes,
    part_seconds,
    seconds_between_failures,
    seconds_between_snapshots,
    slowed_by,
    snapshot_bytes,
)
from protomodels_cli.errors import EXIT_OUTSIDE, UserError
from protomodels_cli.spec.schema import RunSpec

DAY, HOUR = 86_400.0, 3600.0
uploads, steps = st.floats(0, 5000), st.floats(0.01, 5000)
between = st.floats(60, 100 * DAY)


@pytest.mark.parametrize(
    ("upload", "step", "failures", "seconds"),
    [
        (0.0, 0.2, 6 * HOUR, SHORTEST),  # nothing was uploaded yet
        (0.0, 150.0, 6 * HOUR, 150.0),  # … and a step takes longer
        (60.0, 1.0, 6 * HOUR, math.sqrt(2 * 6.0 * 6 * HOUR)),
        (60.0, 1.0, 1.5 * HOUR, math.sqrt(2 * 6.0 * 1.5 * HOUR)),  # four times the failures: twice as often
        (1400.0, 160.0, 1.5 * HOUR, 1400.0),  # one is complete before the next is begun
        (4800.0, 160.0, 6 * HOUR, 4800.0),  # … also if that is more than an hour
        (600.0, 1.0, 30 * DAY, LONGEST),
        (600.0, 7000.0, 30 * DAY, 7000.0),
    ],
)
def test_the_time_between_snapshots(upload: float, step: float, failures: float, seconds: float):
    assert seconds_between_snapshots(upload, step, failures) == pytest.approx(seconds)


def test_what_an_upload_costs_is_measured_within_reason():
    assert slowed_by([12.0, 60.0, 13.0], [10.0, 9.0, 99.0]) == pytest.approx(0.3), "medians: a blip is no measurement"
    assert slowed_by([9.0], [10.0]) == LEAST_SLOWED
    assert slowed_by([90.0], [10.0]) == MOST_SLOWED
    often, seldom = (seconds_between_snapshots(60.0, 1.0, 6 * HOUR, share) for share in (0.02, 0.08))
    assert seldom == pytest.approx(2 * often)


@given(uploads, steps, between)
def test_it_keeps_to_its_bounds(upload: float, step: float, failures: float):
    found = seconds_between_snapshots(upload, step, failures)
    least = max(SHORTEST, upload, step)
    assert least <= found <= max(LONGEST, least)


@given(uploads, steps, between, st.floats(1, 10))
def test_dearer_snapshots_come_less_often_and_failures_make_them_come_more_often(
    upload: float, step: float, failures: float, more: float
):
    found = seconds_between_snapshots(upload, step, failures)
    assert seconds_between_snapshots(upload * more, step, failures) >= found
    assert seconds_between_snapshots(upload, step, failures / more) <= found


@given(st.floats(1, 100), st.floats(HOUR, 4 * DAY), st.floats(0.2, 5))
def test_no_other_time_costs_less(upload: float, failures: float, other: float):
    """What snapshots cost, and what is redone after failures, a second of the run: searched where no bound is felt."""
    found = seconds_between_snapshots(upload, 1.0, failures)

    def lost(seconds: float) -> float:
        return SLOWED * upload / seconds + (seconds / 2 + upload) / failures

    if max(SHORTEST, upload) < found < LONGEST:
        assert lost(found) <= lost(found * other) * (1 + 1e-9)


@given(st.integers(1, 64), st.floats(0, 100 * DAY), st.integers(0, 1000))
def test_failures_that_were_seen_count_more_the_longer_it_runs(stages: int, seconds: float, failures: int):
    found = seconds_between_failures(stages, seconds, failures)
    assert seconds_between_failures(stages, 0.0, 0) == PEER_SECONDS / stages
    assert seconds_between_failures(stages, seconds, failures + 1) < found
    assert seconds_between_failures(stages, seconds + 1, failures) > found
    many = 10_000 * PEER_SECONDS
    assert seconds_between_failures(stages, many, 1000) == pytest.approx(many / 1000, rel=0.01)


@pytest.mark.parametrize(
    ("snapshots", "seconds"),
    [
        ({}, SHORTEST),
        ({"interval": 7}, math.inf),
        ({"interval": 0}, math.inf),
        ({"every": "20min"}, 1200.0),
        ({"every": "90s", "interval": 7}, 90.0),
        ({"every": "0.5d"}, DAY / 2),
    ],
)
def test_the_spec_comes_first(snapshots: dict[str, object], seconds: float):
    assert due_after(make_spec(snapshots=snapshots), 4, 0.0, 1.0) == seconds


@pytest.mark.parametrize(
    ("snapshots", "by", "interval"),
    [
        ({"interval": 100}, "steps", 1000.0),
        ({"interval": 0}, "steps", math.inf),
        ({"every": "95s"}, "every", 100.0),  # ten steps
        ({"every": "95s", "interval": 9}, "steps", 90.0),
        ({}, "failures", 60.0),
    ],
)
def test_a_forecast_says_which_of_them_comes_first_in_whole_steps(
    snapshots: dict[str, object], by: str, interval: float
):
    spec = make_spec(stages=2, steps=1000, snapshots=snapshots)
    found = forecast_saving(spec, 8e8, step=10.0)
    assert (found.by, found.interval_seconds) == (by, interval)
    assert found.upload_seconds == pytest.approx(found.part_bytes / 1e8)
    assert found.redo_seconds == min(10_000.0 / 2, interval / 2 + found.upload_seconds)
    assert found.restore_seconds > found.upload_seconds


def test_an_upload_has_what_the_steps_leave_of_the_line_and_its_least_rate():
    spec = make_spec(stages=2)
    idle, half, full = (forecast_saving(spec, 8e8, step=10.0, busy=busy) for busy in (0.0, 0.5, 1.0))
    assert half.upload_seconds == 2 * idle.upload_seconds
    assert full.upload_seconds == pytest.approx(IN_TIME * part_seconds(spec, full.part_bytes))
    assert half.restore_seconds == idle.restore_seconds, "no steps are done then"


def a_run(**snapshots: object) -> tuple[RunSpec, int]:
    spec = make_spec(stages=2, snapshots=snapshots)
    sizes = StageMemory(spec)
    return spec, sizes.saved(0, 2) + sizes.saved(2, 4)


def test_what_snapshots_take_on_the_coordinators_disk():
    spec, each = a_run(keep=3)
    assert snapshot_bytes(spec, [2, 2]) == each
    assert kept_bytes(spec, [2, 2]) == 4 * each
    init = spec.model_copy(update={"model": spec.model.model_copy(update={"init": "start"})})
    assert 4 * each < kept_bytes(init, [2, 2]) < 5 * each, "what it starts from is kept, without an optimizer's state"
    assert missing_room(spec, [2, 2], None) == 0
    assert missing_room(spec, [2, 2], each + RESERVE) == 0
    assert missing_room(spec, [2, 2], each + RESERVE - 7) == 7


@pytest.mark.parametrize(("fit", "keep"), [(4, None), (3, 2), (2, 1), (1, 0)])
def test_a_run_whose_snapshots_do_not_fit_does_not_begin(fit: int, keep: int | None, tmp_path: Path):
    """`keep`: the most that fit, which is advised if it is one at least."""
    spec, each = a_run(keep=3)

    def free(folder: Path) -> int:
        assert folder == tmp_path
        return RESERVE + fit * each

    if keep is None:
        check_room(spec, tmp_path, free)
        return
    with pytest.raises(UserError) as refused:
        check_room(spec, tmp_path, free)
    assert (refused.value.kind, refused.value.exit_code) == ("disk_too_small", EXIT_OUTSIDE)
    assert re.findall(r"snapshots.keep to (\d+)", str(refused.value)) == ([str(keep)] if keep else [])


@pytest.mark.parametrize(
    ("snapshots", "refused"),
    [({"interval": 0}, False), ({"interval": 0, "every": "1h"}, True), ({"interval": 5}, True), ({}, True)],
)
def test_a_run_that_is_saved_at_its_end_alone_needs_the_room_then(snapshots, refused, tmp_path: Path):
    """As every benchmark's, which has no end of its own."""
    spec = make_spec(stages=2, snapshots=snapshots)
    with pytest.raises(UserError) if refused else contextlib.nullcontext():
        check_room(spec, tmp_path, lambda _: RESERVE)


def test_what_a_codec_remembers_of_samples_refuses_no_run():
    """Nobody knows how many samples there are before the data are prepared."""
    spec = make_spec(stages=2, steps=10**9, wire={"forward": "int4+aqsgd"}, data={"max_bytes": None})
    assert missing_room(spec, [2, 2], 10 * RESERVE) == 0
    assert snapshot_bytes(spec, [2, 2]) > 10 * RESERVE


def test_the_command_refuses_before_it_prepares_data_or_opens_a_port(tmp_path: Path):
    """A real disk: 97 TiB of snapshots fit on none here."""
    from starting import ROOT, pmtrain

    huge = (ROOT / "configs" / "llama-8b.yaml").read_text().replace("keep: 2", "keep: 1700")
    (tmp_path / "huge.yaml").write_text(huge)
    done = pmtrain("coordinator", "huge.yaml", "--port", "0", cwd=tmp_path)
    assert done.returncode == EXIT_OUTSIDE
    assert "runs/llama-8b: " in done.stderr
    assert not (tmp_path / "runs" / "llama-8b" / "link").exists()


def test_a_coordinator_looks_at_its_disk_while_it_leads(tmp_path: Path):
    spec = make_spec(stages=2)
    folder = open_run_dir(tmp_path / "run", spec, tmp_path)
    answers: list[int | OSError] = [OSError("gone"), 7]

    def free(path: Path) -> int:
        assert path == folder.path
        if isinstance(answer := answers.pop(0) if len(answers) > 1 else answers[0], OSError):
            raise answer
        return answer

    async def lead(**how: Callable[[Path], int]) -> list[int | None]:
        coordinator, seen = Coordinator(corpus_of(spec), folder, print, **how), []
        ticking = asyncio.create_task(coordinator._tick())
        for _ in range(2):
            tick = await coordinator._events.get()
            assert isinstance(tick, Tick)
            seen.append(tick.room)
        ticking.cancel()
        return seen

    with contextlib.closing(folder.lock):
        assert asyncio.run(lead(free=free)) == [None, 7], "a disk that does not answer stops nobody"
        usage, [first, _] = shutil.disk_usage(tmp_path), asyncio.run(lead())
    assert first == pytest.approx(usage.free, abs=1 << 30)
