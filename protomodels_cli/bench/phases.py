"""What benchmarks in phases have in common: a run whose pace is that of its links, and the steps within each phase."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from protomodels_cli.bench.loopback import small
from protomodels_cli.errors import UserError
from protomodels_cli.launch.local import LocalRun
from protomodels_cli.quantities import duration
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.schema import RunSpec

START_SECONDS = 180.0
Row = dict[str, Any]


def link_bound(name: str, link: str) -> RunSpec:
    """Of a run that does not end by itself."""
    return small(
        name=name,
        steps=1_000_000,
        stages=2,
        model={"layers": 2},
        subspace={"form": "dense"},
        wire={"forward": "fp32", "backward": "fp32", "link": parse_link(link).model_dump()},
    )


def median_step(steps: Sequence[Row], phases: Sequence[Row]) -> Row:
    """Of those that lie within one of the phases."""
    within = [s for s in steps if any(p["began"] <= s["at"] - s["seconds"] and s["at"] <= p["ended"] for p in phases)]
    return {"steps": len(within), "step_s": statistics.median(s["seconds"] for s in within) if within else None}


def steps_decided(running: LocalRun) -> int:
    metrics = running.folder / "metrics.jsonl"
    return metrics.read_text().count('"event":"step"') if metrics.exists() else 0


def wait_for_steps(running: LocalRun) -> None:
    until = time.monotonic() + START_SECONDS
    while steps_decided(running) < 3:
        if running.coordinator.poll() is not None:
            raise running.failure()
        if time.monotonic() > until:
            what = f"no step was decided within {duration(START_SECONDS)}"
            raise UserError(what, f"look into {running.folder}/logs", "no_steps")
        time.sleep(0.2)
