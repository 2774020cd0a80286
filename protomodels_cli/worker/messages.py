"""Between protobuf's words and the engine's. Pure. It must not know who sends what when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protomodels_cli.cost.recompute import Picked
from protomodels_cli.model.shape import Slice
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker.generation import Generation
from protomodels_cli.worker.notices import StageAssigned
from protomodels_cli.worker.orders import Assignment, Decide, TaskReport


def assignment_of(assigned: pb.Assignment, picked: Picked) -> Assignment:
    return Assignment(
        assigned.task,
        assigned.generation,
        assigned.lineage,
        assigned.step,
        limit=picked.in_flight,
        owed=assigned.owed,
        recompute=picked.recompute,
    )


def assigned_notice(assigned: pb.Assignment, layers: Slice) -> StageAssigned:
    return StageAssigned(
        assigned.generation,
        assigned.stage,
        len(assigned.layers_per_stage),
        layers.first_layer,
        layers.end_layer,
        "memory" if assigned.reuse else "snapshot" if assigned.HasField("restore") else "seed",
        assigned.step,
    )


def decision_of(message: pb.Decision) -> Decide:
    return Decide(message.step, message.apply, message.lr, message.clip)


def lost_message(assigned: pb.Assignment, why: str) -> pb.SnapshotLost:
    """The snapshot that this stage should be restored from."""
    lost = assigned.restore
    return pb.SnapshotLost(generation=assigned.generation, lineage=lost.lineage, step=lost.step, why=why)


def done_message(report: TaskReport, generation: Generation, machine: Mapping[str, Any], cpu_seconds: float) -> pb.Done:
    sync, used = report.sync, report.usage
    return pb.Done(
        task=report.task,
        generation=generation.number,
        t_fixed_sha256=sync.t_fixed_sha256 if sync else "",
        t_fixed_version=sync.t_fixed_version if sync else 0,
        basis_sha256=sync.basis_sha256 if sync else "",
        basis_version=sync.basis_version if sync else 0,
        norms=[pb.UnitNorm(unit=unit, squared=squared) for unit, squared in report.norms.items()],
        loss_sum=report.loss_sum,
        tokens=report.tokens,
        parameters=[pb.ParameterHash(name=name, sha256=sha256) for name, sha256 in report.parameters],
        recorded=generation.recording.reported(report.step) if generation.recording and report.step else None,
        usage=replace(
            used,
            forward_bytes=generation.sent_since("next", "forward"),
            backward_bytes=generation.sent_since("previous", "backward"),
            cpu_s=cpu_seconds,
            refused_frames=generation.refused_frames,
            round_trip_s=generation.round_trip_s,
            path=generation.path,
            path_s=generation.path_s,
            punch=generation.punch,
            **machine,
        ).to_message(),
    )
