"""What a run takes from the people who hold it, in a day: upload on their lines, electricity. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protomodels_cli.cost.forecast import Estimate
from protomodels_cli.cost.saving import Saving
from protomodels_cli.spec.schema import LinkSpec

DAY = 86_400.0
WAITING = 0.25  # of what a card may take, while it waits between its kernels
MACHINE = 60.0  # watts of the rest of a machine


@dataclass(frozen=True)
class Daily:
    upload_bytes: float  # of the peer that sends most, with its parts of snapshots; no more than its line carries
    kwh: float  # of all peers that hold a stage, together
    watts: float  # that each one's card or processor may take


def daily(forecast: Estimate, saving: Saving, link: LinkSpec, watts: float) -> Daily:
    forward, backward = forecast.bytes_per_step["forward"], forecast.bytes_per_step["backward"]
    last = len(forecast.stages) - 1
    sent = max(forward * (i < last) + backward * (i > 0) for i in range(last + 1)) / forecast.step_seconds
    if math.isfinite(saving.interval_seconds):
        sent += saving.part_bytes / saving.interval_seconds
    busy = (stage.compute / forecast.step_seconds for stage in forecast.stages)
    power = sum(MACHINE + watts * (share + (1 - share) * WAITING) for share in busy)
    return Daily(DAY * min(sent, link.bits_per_second / 8), power * DAY / 3.6e6, watts)
