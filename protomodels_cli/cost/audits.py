"""What audits cost: bytes on disks and lines, and a spare's time. Pure. docs/audit.md says what an audit is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protomodels_cli.cost.saving import READ_BYTES_PER_S
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.protocol.audit import chance
from protomodels_cli.spec.schema import RunSpec

KEPT_STEPS = 2  # whose messages a peer has on its disk: worker/recording.py
DAY = 86_400.0
CHANCE_STEPS = 500


@dataclass(frozen=True)
class Auditing:
    """Of the stage with most to show, or to compute. Without a spare that could hold any stage nothing is audited."""

    stage_share: float  # of a stage's steps that are audited; less than asked for where snapshots are too few
    audits_a_day: float  # of all stages
    recorded_bytes: int  # on the disk of one peer
    shown_bytes: int  # that an audited peer and its neighbours upload for one audit
    fetched_bytes: int  # by the spare for one audit: what was shown, and a part of a snapshot, if it was not prefetched
    uplink_share: float  # of a peer's line, on average, for what it shows
    spare_seconds: float  # for one audit: fetching, building the stage, one microbatch
    spare_share: float  # of one spare's time; above 1 some audits are left out
    spare_memory: int  # bytes that a spare needs
    found_within: float  # the probability that who lies in every message is found within 500 steps


def forecast_auditing(
    spec: RunSpec,
    bits_per_second: float,
    step: float,
    interval: float,
    part_bytes: int,
    compute: Sequence[float],
    memory: int,
) -> Auditing | None:
    """None: nobody is audited. `step` and `interval`, between two snapshots, in seconds; `compute`: of each stage,
    seconds a step."""
    stages, every = len(compute), interval / step
    if not spec.audit or stages < 2:
        return None
    per_token, tokens = boundary_bytes(spec), spec.batch.size * spec.model.context
    crossing = (per_token["forward"] + per_token["backward"]) * tokens
    boundaries = min(2, stages - 1)  # of one stage
    shown = boundaries * crossing / spec.batch.microbatches
    share = min(spec.audit, 1 / every)
    fetched = shown + part_bytes
    seconds = 8 * fetched / bits_per_second + part_bytes / READ_BYTES_PER_S + max(compute) / spec.batch.microbatches
    return Auditing(
        stage_share=share,
        audits_a_day=share * stages * DAY / step,
        recorded_bytes=math.ceil(KEPT_STEPS * boundaries * crossing),
        shown_bytes=math.ceil(shown),
        fetched_bytes=math.ceil(fetched),
        # A boundary is shown if one of its two stages is audited, by either end: in one of two cases by this one.
        uplink_share=8 * share * shown / (bits_per_second * step),
        spare_seconds=seconds,
        spare_share=share * stages * seconds / step,
        spare_memory=memory,
        found_within=chance(spec.audit, max(1, round(every)), CHANCE_STEPS) if math.isfinite(every) else 0.0,
    )
