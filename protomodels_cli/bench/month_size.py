"""What a month's run takes: the shape of LLaMA-3 8B in 16 stages, with times by the forecast of `pmtrain plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protomodels_cli.cost.forecast import forecast
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.saving import READ_BYTES_PER_S
from protomodels_cli.spec.cut import layers_per_stage, spans
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import LinkSpec, RunSpec

LINE = LinkSpec(bandwidth="80mbit", latency="25ms")  # of every peer, both ways
SHARED = LinkSpec(bandwidth="40mbit", latency="25ms")  # what activations have of it beside an upload: as much
FLOPS, MEMORY = 20e12, 24 << 30  # of every peer
CUT = [3, *[2] * 14, 1]  # the last stage has the head, and is the slowest with one layer too
COPY_BYTES_PER_S = 5e9  # at which a stage is copied to host memory between two steps
SPEC: dict[str, Any] = {  # configs/llama-8b.yaml's shape as reparam: 58 GiB of state; its data play no part here
    "name": "month",
    "steps": 1_000_000,
    "stages": CUT,
    "model": {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "hidden": 14336,
        "context": 4096,
        "rope_theta": 500000.0,
    },
    "subspace": {
        "form": "reparam",
        "k": 64,
        "unconstrained_layers": 1,
        "t_fixed": {"scale": 0.1, "seed": 0},
        "update": {"interval": 0},
        "sync_interval": 100,
    },
    "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
    "batch": {"size": 256, "microbatches": 256},
    "eval": {"interval": 0},
    "data": {"source": "parquet", "files": ["corpus/*.parquet"], "field": "text"},
    "tokenizer": {"kind": "file", "file": "tokenizer.json", "vocab_size": 128256},
    "wire": {"forward": "bf16", "backward": "bf16"},
    "snapshots": {"keep": 2, "warm_spares": True},
    "compute": {"loss_chunk": 1024},
}


@dataclass(frozen=True)
class Steps:
    """By the forecast of `plan`, in seconds."""

    alone: float
    beside: float  # while parts are uploaded over the same lines
    lines: tuple[float, ...]  # of each stage: its line carries activations for so long a step


@dataclass(frozen=True)
class Size:
    """Seconds, by stage where it is a tuple."""

    spec: RunSpec
    layers: tuple[int, ...]
    part_bytes: tuple[int, ...]
    flops: float  # of each peer
    step: float
    step_beside: float
    upload: tuple[float, ...]  # with what activations leave of a line
    fetch: tuple[float, ...]
    build: tuple[float, ...]  # from a part on disk, or from the seed
    copy: float  # of all stages at the same time

    @property
    def lease(self) -> float:
        return self.spec.limits.lease_seconds


def forecast_steps() -> Steps:
    spec = spec_from(SPEC)
    alone, shared = (forecast(spec, line, FLOPS, memory=MEMORY) for line in (LINE, SHARED))
    beside = max(alone.step_seconds, shared.step_seconds)
    return Steps(alone.step_seconds, beside, tuple(stage.line for stage in alone.stages))


def size_of(predicted: Steps, **snapshots: Any) -> Size:
    """`snapshots`: fields of the spec, where they are not as in SPEC."""
    spec = spec_from({**SPEC, "snapshots": {**SPEC["snapshots"], **snapshots}})
    layers, sizes = layers_per_stage(spec), StageMemory(spec)
    parts = tuple(sizes.saved(span.start, span.stop) for span in spans(layers))
    fetch = tuple(8 * part / LINE.bits_per_second for part in parts)
    return Size(
        spec=spec,
        layers=tuple(layers),
        part_bytes=parts,
        flops=FLOPS,
        step=predicted.alone,
        step_beside=predicted.beside,
        upload=tuple(
            seconds / (1 - busy / predicted.alone) for seconds, busy in zip(fetch, predicted.lines, strict=True)
        ),
        fetch=fetch,
        build=tuple(part / READ_BYTES_PER_S for part in parts),
        copy=max(parts) / COPY_BYTES_PER_S,
    )
