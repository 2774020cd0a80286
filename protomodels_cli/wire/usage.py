"""Where a stage's time and bytes went over one task: the same figures in the worker, on the wire and in the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from protomodels_cli.wire.path import checked_path, checked_punch
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


@dataclass
class Usage:
    compute_s: float = 0.0  # in the model
    wait_s: float = 0.0  # nothing to do: neighbours or the coordinator had not sent yet
    wire_s: float = 0.0  # packing and unpacking, and idle while own frames were on their way out
    forward_bytes: int = 0  # of the frames sent to the next stage
    backward_bytes: int = 0  # … to the previous stage
    most_in_flight: int = 0  # microbatches held at one time, at most
    peak_memory: int = 0  # bytes: of a GPU since the stage was built, else of the process since it began
    cpu_s: float = 0.0  # of the process, since its first step was granted
    refused_frames: int = 0  # of another generation: dropped, since the stage was assigned
    forecast_memory: int = 0  # that the stage was said to take on its device, at most
    reserved_memory: int = 0  # of a GPU: what torch held for the process at most, gaps included
    round_trip_s: float = 0.0  # to the next stage and back, lately, at least; 0: not known
    path: str = ""  # of the link to the next stage: loopback, lan, public, punched, relay …, door; empty: not known
    path_s: float = 0.0  # that it took to open first, in this generation
    grown_forward: float = 0.0  # the largest message from the previous stage, of the largest in the last steps; 0: none
    grown_backward: float = 0.0  # … from the next stage
    punch: str = ""  # why that link is not punched; empty: not known, or it is
    celsius: float = 0.0  # of the peer's first card, lately; 0: not known
    watts: float = 0.0  # that this card draws

    @classmethod
    def from_message(cls, message: pb.Usage) -> Usage:
        told = {name: getattr(message, name) for name in cls.__dataclass_fields__}
        sound = {k: v for k, v in told.items() if not isinstance(v, float) or 0 <= v < math.inf}
        used = cls(**sound)
        used.path, used.punch = checked_path(used.path), checked_punch(used.punch)
        return used

    def to_message(self) -> pb.Usage:
        return pb.Usage(**asdict(self))


def at_rest(used: Usage) -> Usage:
    """Without what belongs to a step: what a stage occupies, and its link, stay as they are."""
    return replace(used, compute_s=0.0, wait_s=0.0, wire_s=0.0, forward_bytes=0, backward_bytes=0, most_in_flight=0)


def columns(stages: Sequence[Usage]) -> dict[str, list[Any]]:
    """All stages' figures by name, as the metrics have them: names once a row, not once a stage; seconds to the
    microsecond."""

    def shown(value: Any) -> Any:
        return round(value, 6) if isinstance(value, float) else value

    return {name: [shown(getattr(used, name)) for used in stages] for name in Usage.__dataclass_fields__}


def by_stage(figures: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The same, stage by stage."""
    return [dict(zip(figures, of_stage, strict=True)) for of_stage in zip(*figures.values(), strict=True)]
