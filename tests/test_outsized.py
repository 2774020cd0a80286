"""Messages that are far larger than any of late: a table, and a peer that sends such by real processes."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from conftest import make_spec
from pool import Pool
from told import events, wait_for_event

from protomodels_cli.coordinator.outsized import OUTSIZED
from protomodels_cli.wire.client import operator
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.usage import Usage
from protomodels_cli.worker.sizes import LEAST, MOST, STEPS, Sizes


def after(*steps: tuple[float, bool]) -> Sizes:
    sizes = Sizes()
    for size, applied in steps:
        sizes.see([size / 2, size])
        sizes.decide(applied)
    return sizes


@pytest.mark.parametrize(
    ("before", "now", "grown"),
    [
        ([(1.0, True)] * LEAST, 5.0, 5.0),
        ([(1.0, True)] * (LEAST - 1), 5e9, 0.0),  # too early to say
        ([(1.0, True)] * LEAST + [(1e9, False)] * 3, 5.0, 5.0),  # what was skipped is not remembered
        ([(100.0, True)] + [(1.0, True)] * STEPS, 5.0, 5.0),  # nor what is long ago
        ([(100.0, True)] + [(1.0, True)] * (STEPS - 1), 5.0, 0.05),
        ([(0.0, True)] * LEAST, 5.0, 0.0),
        ([(1.0, True)] * LEAST, float("inf"), MOST),
        ([(1.0, True)] * LEAST, float("nan"), MOST),
    ],
)
def test_how_much_larger_than_of_late(before: list[tuple[float, bool]], now: float, grown: float):
    sizes = after(*before)
    sizes.see([now])
    assert sizes.grown == grown


def test_who_sends_a_million_times_as_much_is_named_and_nobody_else(pool: Pool):
    """Others pass on what it sends, gradients above all: they are not named for that."""
    spec = make_spec(stages=3, steps=14)
    fault = {"kind": "inflate", "by": 1e6, "since": 10}
    run_dir = pool.start(spec, [{}, {"fault": fault}, {}])
    named = wait_for_event(run_dir, "outsized_messages")
    assert {e["name"] for e in events(run_dir, "outsized_messages")} == {"peer-1"}
    assert named["times"] > OUTSIZED
    link = JoinLink.parse((run_dir / "link").read_text())

    async def counted() -> dict[str, int]:
        async with operator(link) as desk:
            return {peer.name: peer.outsized for peer in (await desk.status()).peers}

    if counts := asyncio.run(counted()):  # the run may be over by now
        assert {name for name, many in counts.items() if many} == {"peer-1"}
    assert pool.coordinator.result()["exit"] == 0
    assert not events(run_dir, "peer_dismissed")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    grown = [row["stages"]["grown_forward"] for row in rows if row["event"] == "step"]
    assert max(max(of_step) for of_step in grown[: fault["since"] - 1]) < OUTSIZED, "honest ones are far below"
    for process in pool.peers[:3]:
        process.renew()


def test_figures_that_are_none_count_as_nothing():
    told = Usage(grown_forward=math.inf, path_s=math.nan, cpu_s=-1.0, round_trip_s=0.5)
    assert Usage.from_message(told.to_message()) == Usage(round_trip_s=0.5)
