"""What a coordinator has seen of snapshots since it was started: when the last one was begun, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

from protomodels_cli.cost.saving import SLOWED


@dataclass(frozen=True)
class Pace:
    lineage: int = 0  # of which the next two are; another one: the time starts again with its next step
    since: float = 0.0  # when the last snapshot was begun, or the first step that is not saved was granted
    step: int = 0  # of the snapshot that was begun then; 0: none
    due: bool = False  # enough time had passed at the last decision
    no_room: bool = False  # the last one that was due was skipped, since the disk has no room for it
    # Seconds, as measured last; none: not yet
    upload: float | None = None  # from its beginning until all parts of a snapshot were here
    build: float | None = None  # the slowest stage, from the seed or from a part on its peer's disk
    restore: float | None = None  # … with a part that had to be fetched, that included
    # Of this lineage, the last steps: seconds of those that ran beside an upload all along, and of those without
    beside: tuple[float, ...] = ()
    alone: tuple[float, ...] = ()
    slowed: float = SLOWED  # the share by which the former are slower, as measured last
