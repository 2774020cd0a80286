"""The room that snapshots need on the coordinator's disk: before a run begins, and before each snapshot.

What codecs remember of samples is left out, since nobody knows here how many there are: what is refused has no room for
certain, and a disk that is full after all costs one snapshot (uploads.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from protomodels_cli.cost.saving import kept_bytes, snapshot_bytes
from protomodels_cli.errors import UserError
from protomodels_cli.files import free_bytes
from protomodels_cli.quantities import plural, size
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec

RESERVE = 64 << 20  # bytes for the journal, metrics and logs: a run without a snapshot goes on, one without these ends


def missing_room(spec: RunSpec, layers: Sequence[int], free: int | None) -> int:
    """Bytes that a disk with so many free ones lacks for one more snapshot. None: nobody has looked."""
    return 0 if free is None else max(0, snapshot_bytes(spec, layers, windows=0) + RESERVE - free)


def check_room(spec: RunSpec, folder: Path, free: Callable[[Path], int] = free_bytes) -> None:
    """Raises UserError where the snapshots of a new run cannot fit on the disk of its directory. With `stages: auto` as
    if there were one stage: more of them take a little more. A run that is saved at its end alone is not refused: it
    then waits for the room, and a benchmark's never gets there."""
    if spec.snapshots.interval == 0 and spec.snapshots.every is None:
        return
    layers, found = layers_per_stage(spec), free(folder)
    wanted, each = kept_bytes(spec, layers, windows=0) + RESERVE, snapshot_bytes(spec, layers, windows=0)
    if wanted <= found:
        return
    keep = spec.snapshots.keep
    fewer = keep + (found - wanted) // each  # the most that fit
    lower = f"set snapshots.keep to {fewer}, " if fewer >= 1 else ""
    raise UserError(
        f"{folder}: snapshots need {size(wanted)} of disk, and {size(found)} are free "
        f"(snapshots.keep = {keep}: {plural(keep + 1, 'snapshot')} of {size(each)}, with the one that arrives)",
        f"free {size(wanted - found)}, {lower}or choose a --dir on a larger disk",
        kind="disk_too_small",
    )
