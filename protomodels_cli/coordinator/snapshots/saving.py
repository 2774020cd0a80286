"""The state of snapshots that the journal does not keep: which parts have arrived, and how long uploads take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protomodels_cli.coordinator.snapshots.failures import PartFailure
from protomodels_cli.coordinator.snapshots.pace import Pace


@dataclass(frozen=True)
class Saving:
    asked: tuple[int, int] = (0, 0)  # generation and step in which the stages were last asked for their parts
    whole: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # begun snapshot → the hashes of all its parts
    arrived: Mapping[tuple[int, int], frozenset[int]] = field(default_factory=dict)  # … → stages whose part is here
    due: Mapping[tuple[int, int], float] = field(default_factory=dict)  # … → until when its parts are waited for
    late: int = 0  # snapshots in a row that were given up because most parts were late
    unsaved: tuple[int, PartFailure, float] | None = None  # the snapshot of this step failed: why, and when
    pace: Pace = field(default_factory=Pace)
    room: int | None = None  # bytes that are free on the disk for snapshots; None: nobody has looked
