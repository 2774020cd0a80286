"""How often a run should be saved, what that takes of a disk, and what a crash costs. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.units import number_bytes, unit_parameters
from protomodels_cli.spec.cut import layers_per_stage, spans
from protomodels_cli.spec.schema import RunSpec

PEER_SECONDS = 2 * 86_400.0  # between two failures of one peer, before any was seen
SLOWED = 0.1  # share by which steps are slower while parts are uploaded, before that was measured
LEAST_SLOWED, MOST_SLOWED = 0.01, 1.0  # what is believed of a measurement
SHORTEST, LONGEST = 60.0, 3600.0  # seconds between two snapshots
# Bits a second that an upload must reach on average, where the spec does not make it slower: beside activations that
# fill an 80 Mbit/s line, a part has a twentieth.
SLOW_LINE = 4e6
IN_TIME = 0.8  # of the time that a part has: what an upload takes that gets no more than its least rate
PART_AT_LEAST = 120.0  # seconds: to copy and write a part, and for a line that is gone for a while
READ_BYTES_PER_S = 5e8  # at which a part is read, hashed and put on a device


def seconds_between_failures(stages: int, seconds: float, failures: int) -> float:
    """The mean, after so many failures in so many seconds. What every run begins with counts as one failure of a peer
    in two days: a run of eight stages then expects one in six hours, and learns from what it sees."""
    return (seconds + PEER_SECONDS / max(1, stages)) / (failures + 1)


def seconds_between_snapshots(upload: float, step: float, between_failures: float, slowed: float = SLOWED) -> float:
    """The square root of twice the cost of a snapshot times the mean time between failures (Young; Daly): there, what
    snapshots cost and what has to be redone after failures are least together.

    The steps go on while a snapshot is uploaded, slower by a share `slowed`, so it costs that share of its upload. At
    most an hour; at least a minute, a step, and an upload: one is complete before the next is begun. `upload`: 0 while
    none was measured; then the first snapshot comes as early as may be, and is the measurement."""
    best = math.sqrt(2 * slowed * upload * between_failures)
    return max(min(best, LONGEST), SHORTEST, upload, step)


def slowed_by(beside: Sequence[float], alone: Sequence[float]) -> float:
    """The share by which steps are slower while parts are uploaded, by what steps took beside an upload and without."""
    measured = statistics.median(beside) / max(statistics.median(alone), 1e-9) - 1
    return min(max(measured, LEAST_SLOWED), MOST_SLOWED)


def due_after(
    spec: RunSpec,
    stages: int,
    upload: float,
    step: float,
    seconds: float = 0.0,
    failures: int = 0,
    slowed: float = SLOWED,
) -> float:
    """Seconds after which a snapshot is due since the last one was begun: the spec's. Where that has neither a time nor
    a number of steps, what is best for what was seen of the run: what an upload and a step take, by which share it
    slows steps, and so many failures in so many seconds."""
    if spec.snapshots.every_seconds is not None:
        return spec.snapshots.every_seconds
    if spec.snapshots.interval is not None:
        return math.inf
    return seconds_between_snapshots(upload, step, seconds_between_failures(stages, seconds, failures), slowed)


def largest_part(spec: RunSpec, layers: Sequence[int]) -> int:
    """Bytes of a snapshot of a run that is cut so."""
    memory = StageMemory(spec)
    return max(memory.saved(span.start, span.stop) for span in spans(layers))


def part_seconds(spec: RunSpec, largest: int, cap: float = math.inf) -> float:
    """How long the parts of a snapshot may take to arrive: so many bytes, over a slow line. `cap`: bits a second that a
    holder sends at most."""
    if spec.limits.part_seconds is not None:
        return spec.limits.part_seconds
    allowed = min(spec.snapshots.bits_per_second or math.inf, spec.wire.link.bits_per_second)
    return PART_AT_LEAST + 8 * largest / min(SLOW_LINE, allowed / 2, cap / 2)


def least_rate(spec: RunSpec, size: int, cap: float = math.inf) -> float:
    """Bytes a second that an upload of so many has even where it yields, so that it is in time."""
    return max(size, 1) / (IN_TIME * part_seconds(spec, size, cap))


def snapshot_bytes(spec: RunSpec, layers: Sequence[int], windows: int | None = None) -> int:
    """One snapshot of a run that is cut so: all parts. `windows`: how many samples the data has, where a codec
    remembers each; None: as many as the run could see."""
    sizes = StageMemory(spec, windows)
    return sum(sizes.saved(span.start, span.stop) for span in spans(layers))


def kept_bytes(spec: RunSpec, layers: Sequence[int], windows: int | None = None) -> int:
    """What snapshots take on the coordinator's disk, at most: those that are kept and the one that arrives; and for as
    long as the run lasts the one that was cut from a checkpoint, which has weights alone."""
    first = sum(unit_parameters(spec).values()) * number_bytes(spec) if spec.model.init is not None else 0
    return (spec.snapshots.keep + 1) * snapshot_bytes(spec, layers, windows) + first


@dataclass(frozen=True)
class Saving:
    """What snapshots take, and what they leave to be redone."""

    part_bytes: int  # of the largest part
    snapshot_bytes: int
    disk_bytes: int  # on the coordinator, of all that are there at one time
    upload_seconds: float
    interval_seconds: float  # between two snapshots, in whole steps; infinite where there is only one
    by: Literal["steps", "every", "failures"]  # what that follows from
    redo_seconds: float  # after a crash, on average
    restore_seconds: float  # fetching the largest part, and building its stage


def forecast_saving(
    spec: RunSpec, bits_per_second: float, step: float, windows: int | None = None, busy: float = 0.0
) -> Saving:
    """For peers with lines of so many bits a second, either way, and steps of so many seconds, which use a share `busy`
    of the line: uploads have what they leave.

    A snapshot counts once it has arrived, so what has to be redone after a crash goes back by one upload at least and
    an upload and an interval at most: by an upload and half an interval on average, and by half the run where it is
    shorter than that."""
    layers, sizes = layers_per_stage(spec), StageMemory(spec, windows)
    part = max(sizes.saved(span.start, span.stop) for span in spans(layers))
    left = min(bits_per_second, max(bits_per_second * (1 - busy), 8 * least_rate(spec, part)))
    upload = 8 * part / min(left, spec.snapshots.bits_per_second or math.inf)
    time = due_after(spec, len(layers), upload, step)
    timed = math.ceil(time / step) * step if math.isfinite(time) else math.inf
    stepped = spec.snapshots.interval * step if spec.snapshots.interval else math.inf
    interval = min(timed, stepped)
    by: Literal["steps", "every", "failures"] = "every" if spec.snapshots.every else "failures"
    return Saving(
        part_bytes=part,
        snapshot_bytes=snapshot_bytes(spec, layers, windows),
        disk_bytes=kept_bytes(spec, layers, windows),
        upload_seconds=upload,
        interval_seconds=interval,
        by=by if timed < stepped else "steps",
        redo_seconds=min(spec.steps * step / 2, upload + interval / 2),
        restore_seconds=8 * part / bits_per_second + part / READ_BYTES_PER_S,
    )
