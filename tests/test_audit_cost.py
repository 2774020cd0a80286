"""What audits cost, by hand: a closed form beside the one that `plan` uses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from conftest import make_spec

from protomodels_cli.cost.audits import Auditing, forecast_auditing

# fp32 of k = 6 numbers a token each way (24 bytes), and two bytes of a token id on the way forward: 50 bytes a token.
# A step has 4 samples of 16 tokens in 2 microbatches: 3,200 bytes over a boundary, 1,600 in a microbatch.
CROSSING, PART = 3200, 10_000


def costs(audit: float = 0.01, stages: int = 4, interval: float = 50.0, **sections: Any) -> Auditing | None:
    spec = make_spec(audit=audit, stages=stages, **sections)
    return forecast_auditing(spec, 8e4, 1.0, interval, PART, [0.2, *[0.1] * (stages - 1)], 123)


@pytest.mark.parametrize(
    ("case", "share", "audits", "recorded", "shown"),
    [
        ({}, 0.01, 0.01 * 4 * 86_400, 2 * 2 * CROSSING, CROSSING),
        ({"stages": 2}, 0.01, 0.01 * 2 * 86_400, 2 * CROSSING, CROSSING // 2),  # one boundary
        ({"interval": 400.0}, 1 / 400, 4 * 86_400 / 400, 2 * 2 * CROSSING, CROSSING),  # every stage, too seldom
        ({"interval": math.inf}, 0.0, 0.0, 2 * 2 * CROSSING, CROSSING),
    ],
)
def test_what_peers_record_and_show(case: dict[str, Any], share: float, audits: float, recorded: int, shown: int):
    found = costs(**case)
    assert found is not None
    assert found.stage_share == pytest.approx(share)
    assert found.audits_a_day == pytest.approx(audits)
    assert (found.recorded_bytes, found.shown_bytes) == (recorded, shown)
    assert found.fetched_bytes == shown + PART


def test_what_a_spare_does():
    found = costs()
    assert found is not None
    seconds = (CROSSING + PART) * 8 / 8e4 + PART / 5e8 + 0.2 / 2
    assert found.spare_seconds == pytest.approx(seconds)
    assert found.spare_share == pytest.approx(4 * 0.01 * seconds)
    assert found.uplink_share == pytest.approx(0.01 * CROSSING * 8 / 8e4)
    assert found.spare_memory == 123
    assert found.found_within == pytest.approx(1 - 0.5**10), "ten snapshots, and one of two audited after each"


def test_of_a_run_that_audits_nobody_nothing_is_said():
    assert costs(audit=0.0) is None
    assert costs(stages=1, model={"segments": None}) is None, "nothing crosses a boundary"
