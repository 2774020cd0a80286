"""What `bench transfers` makes of steps and phases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from protomodels_cli.bench.transfers import LAYERS, MESSAGE, MICROBATCHES, Setting, compared
from protomodels_cli.cost.line import wire_bytes
from protomodels_cli.cost.saving import largest_part

LINK = "80mbit,25ms"


@pytest.mark.parametrize("size", [16 << 20, 1 << 30])
def test_the_part_is_as_large_as_asked_for_and_messages_are_always_the_same(size: int):
    spec = Setting(LINK, size, 1.0).spec()
    assert largest_part(spec, LAYERS) == pytest.approx(size, rel=0.05)
    assert 4 * spec.model.width * spec.model.context == pytest.approx(MESSAGE, rel=0.05)


def test_steps_beside_a_transfer_are_compared_with_those_beside_none():
    """Steps of 1 s: the third and the fourth are wholly beside a fetch and take 1.2 s, the sixth and the seventh wholly
    beside one on a line of its own and take 1.1 s."""
    took = [1.0, 1.0, 1.2, 1.2, 1.5, 1.1, 1.1]
    steps = [{"at": end, "seconds": t} for end, t in zip(itertools.accumulate(took), took, strict=True)]

    def phase(what: str, how: str, began: float, ended: float, size: int = 0) -> dict[str, Any]:
        return {"what": what, "how": how, "began": began, "ended": ended, "bytes": size, "whole": what == "fetch"}

    phases = [
        phase("none", "yields", 0.0, 2.0),
        phase("fetch", "yields", 1.9, 5.0, 6_200_000),
        phase("fetch", "own_line", 5.8, 8.5),
    ]
    found = compared(LINK, steps, phases)
    assert found["alone"] == {"steps": 2, "step_s": 1.0}
    assert found["line_used_by_steps"] == pytest.approx(2 * MICROBATCHES * wire_bytes(MESSAGE) / 1e7)
    assert found["fetched_s"] == pytest.approx(3.1)
    yielding, own = found["rows"]
    assert (yielding["steps"], yielding["bytes_per_s"]) == (2, pytest.approx(2e6))
    assert yielding["slowed"] == pytest.approx(0.2)
    assert yielding["slowed_against_own_line"] == pytest.approx(1.2 / 1.1 - 1)
    assert own["slowed"] == pytest.approx(0.1)
