"""The fields of a run spec, their defaults and their single-field rules.

Rules that tie two fields together are in `checks.py`. Names here are the names used everywhere: in the
proto, the code, the logs and the docs. docs/spec.md is made from this file (`scripts/docs.sh`).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from protomodels_cli.codecs.base import CodecError
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.forms import Form, Sizes, form_named
from protomodels_cli.quantities import duration, figures, rate
from protomodels_cli.spec.corpus import DataSpec, TokenizerSpec
from protomodels_cli.spec.cut import layers_per_segment
from protomodels_cli.spec.fields import BelowOne, Count, Positive, Section, Seed, Size, Whole
from protomodels_cli.spec.groups import GroupsSpec
from protomodels_cli.spec.model import ModelSpec, SubspaceSpec, is_cut
from protomodels_cli.spec.optimizer import OptimizerSpec
from protomodels_cli.spec.units import bits_per_second, long_seconds, seconds

ANCHOR_TOKENS = 4  # where anchors are trained and a spec does not say otherwise


class BatchSpec(Section):
    size: Size = Field(16, description="Windows per step.")
    microbatches: Size = Field(4, description="Microbatches per step; must divide size.")
    in_flight: Count | None = Field(
        None,
        description=(
            "Microbatches that a stage may hold between their forward and their backward pass, at most. Default: all "
            "of a step's, as far as their messages take no more than 1 GiB and what a stage keeps of them fits its "
            "peer's memory."
        ),
    )


class EvalSpec(Section):
    interval: Whole = Field(100, description="Steps between evaluations on held-out windows; 0: only at the end.")
    windows: Count = Field(64, description="Held-out windows used; the same ones every time.")


def _checked_bandwidth(value: str) -> str:
    try:
        number = bits_per_second(value)
    except ValueError as e:
        raise PydanticCustomError("quantity", str(e), {"fix": "write for example 80mbit"}) from None
    if number <= 0:
        raise PydanticCustomError("quantity", "must be above 0", {"fix": "remove the field for no limit"})
    return value


class LinkSpec(Section):
    """An emulated internet connection for every peer, shared by its links to both neighbours and all that it exchanges
    with the coordinator, whose own connection has no limit.

    For example `{bandwidth: 80mbit, latency: 25ms, jitter: 2ms, loss: 0}`.
    """

    bandwidth: str | None = Field(None, description="Each way, as `80mbit` or `1gbit`. Default: unlimited.")
    latency: str = Field("0ms", description="One way, from peer to peer or to the coordinator.")
    jitter: str = Field("0ms", description="The latency varies by up to this much, up or down. Order is kept.")
    loss: BelowOne = Field(
        0.0, description="Share of packets lost: slows a connection down as TCP (Reno) would, and delays what was lost."
    )

    @field_validator("bandwidth", "latency", "jitter")
    @classmethod
    def _quantities(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if info.field_name == "bandwidth":
            return _checked_bandwidth(value)
        try:
            seconds(value)
        except ValueError as e:
            raise PydanticCustomError("quantity", str(e), {"fix": "write for example 25ms"}) from None
        return value

    @property
    def emulated(self) -> bool:
        return self != LinkSpec()

    @property
    def in_words(self) -> str:
        speed = rate(self.bits_per_second, "bit/s") if self.bandwidth else "unlimited bandwidth"
        jitter = f" ± {duration(self.jitter_s)}" if self.jitter_s else ""
        loss = f" and {figures(100 * self.loss)} % loss" if self.loss else ""
        return f"{speed}, {duration(self.latency_s)}{jitter} of latency{loss}"

    @property
    def bits_per_second(self) -> float:
        return math.inf if self.bandwidth is None else bits_per_second(self.bandwidth)

    @property
    def latency_s(self) -> float:
        return seconds(self.latency)

    @property
    def jitter_s(self) -> float:
        return seconds(self.jitter)


class WireSpec(Section):
    forward: str = Field(
        "int8",
        description="Codec of activations: a base codec, then optional feedback, then optional packing; or "
        "several of those in turn, as `eden:3 then eden:5`. See the table at the end and docs/codecs.md.",
    )
    backward: str = Field("int8", description="Codec of gradients, written in the same way.")
    link: LinkSpec = Field(default_factory=LinkSpec)

    @field_validator("forward", "backward")
    @classmethod
    def _codecs(cls, value: str) -> str:
        try:
            parse_codec(value)
        except CodecError as e:
            raise PydanticCustomError("codec", e.rule.replace("{", "(").replace("}", ")"), {"fix": e.fix}) from None
        return value


class SnapshotSpec(Section):
    interval: Whole | None = Field(
        None,
        description="Steps between snapshots of all stages, from which a crashed run recovers; 0: none by steps, and "
        "without `every` only one at the end.",
    )
    every: str | None = Field(
        None,
        description="Time between snapshots, as `20min` or `1h`: one is due after the first step that ends so long "
        "after the last one was begun, or after `interval` steps, whichever comes first. Default: where neither is "
        "given, the time follows from what uploads take and how often peers fail (docs/reliability.md).",
    )
    keep: Count = Field(
        2, description="How many complete snapshots the coordinator and the peers keep: the newest ones."
    )
    max_bandwidth: str | None = Field(
        None, description="Bandwidth that a peer may use to upload its part, as `5mbit`. Default: unlimited."
    )
    warm_spares: bool = Field(
        False,
        description="Spares prefetch all parts of every complete snapshot, so that a spare takes over a stage without "
        "waiting for its part. Costs disk space on every spare, and the coordinator one more transfer per spare.",
    )
    copy_to: str | None = Field(
        None,
        description="Where the coordinator copies every complete snapshot to: a folder or any URL that fsspec knows, "
        "as `s3://bucket/runs`. A damaged part in the run directory is restored from this copy, and another machine "
        "can continue the run from it (`pmtrain coordinator --from`).",
    )
    direct: Literal["auto", "never"] = Field(
        "auto",
        description="Where `copy_to` is an `s3://` URL: peers put their parts into that store and fetch them from "
        "there themselves, by URLs that the coordinator signs; `never`: all parts go through the coordinator.",
    )

    @field_validator("every")
    @classmethod
    def _every(cls, value: str | None) -> str | None:
        try:
            if value is not None and long_seconds(value) <= 0:
                raise ValueError("must be above 0")
        except ValueError as e:
            raise PydanticCustomError("quantity", str(e), {"fix": "write for example 20min"}) from None
        return value

    @field_validator("max_bandwidth")
    @classmethod
    def _bandwidth(cls, value: str | None) -> str | None:
        return None if value is None else _checked_bandwidth(value)

    @property
    def bits_per_second(self) -> float | None:
        return None if self.max_bandwidth is None else bits_per_second(self.max_bandwidth)

    @property
    def is_direct(self) -> bool:
        """Whether peers use the store themselves, if they and the store can."""
        return self.direct == "auto" and (self.copy_to or "").startswith(("s3://", "s3a://"))

    @property
    def every_seconds(self) -> float | None:
        return None if self.every is None else long_seconds(self.every)


class LimitsSpec(Section):
    nonfinite_steps: Count = Field(
        5,
        description="Steps in a row, skipped for a non-finite loss or gradient, after which the run pauses.",
    )
    nonfinite_action: Literal["pause", "rollback"] = Field(
        "pause",
        description="What happens then: `pause`, or `rollback` to an earlier snapshot once, and pause the next time.",
    )
    lease_seconds: Annotated[float, Field(ge=1, le=3600)] = Field(
        5.0,
        description="A peer counts as lost after at most this time without a heartbeat, and after at least 80 % of it.",
    )
    build_seconds: Positive = Field(
        300.0,
        description="Time for a peer to build its stage from the seed; after that the peer is dismissed and another "
        "takes the stage.",
    )
    restore_seconds: Positive | None = Field(
        None,
        description="Time for a peer to build a stage from a snapshot, the fetching of its part included; after that "
        "the peer is dismissed where another can take the stage. Default: `build_seconds` plus what the part takes at "
        "8 Mbit/s, or at half of the emulated link if that is less, for each part that has to be fetched at that time.",
    )
    reuse_seconds: Positive = Field(
        300.0,
        description="Time for a peer to continue with the stage that it has in memory after other peers have come or "
        "gone, the rest of the work at hand included; after that the peer is dismissed.",
    )
    link_seconds: Positive = Field(
        300.0,
        description="Time for neighbours to open their links; after that all links go through the coordinator, and a "
        "peer that has not opened them after the same time again is dismissed.",
    )
    part_seconds: Positive | None = Field(
        None,
        description="Time for the parts of a snapshot to arrive at the coordinator; after that the snapshot is given "
        "up, and a peer whose part was missing twice in a row is dismissed where a spare can take its stage. "
        "Default: 120 plus what the largest part takes at 4 Mbit/s, or at half of `snapshots.max_bandwidth` or of the "
        "emulated link if that is less.",
    )
    device_seconds: Positive = Field(
        600.0,
        description="Time for a device to do one piece of work (a microbatch, building a stage); after that the device "
        "counts as hung, and its peer reports that and leaves.",
    )
    certificate_seconds: Annotated[float, Field(ge=10, le=31_536_000)] = Field(
        604_800.0,
        description="Life of a peer's certificate and secret. A peer renews them at half of it; one that has not by "
        "its end is out, and joins again with a token. Default: 7 days.",
    )
    connections: Annotated[int, Field(ge=1, le=100_000)] = Field(
        1024,
        description="Connections that the coordinator has open at one time, at most; fewer where its system allows it "
        "fewer than three open files for each. A peer takes one, and another for each of its links that is relayed.",
    )
    connections_per_address: Annotated[int, Field(ge=1, le=100_000)] = Field(
        64, description="Likewise from one IPv4 address, or from one IPv6 network of 64 bits."
    )


class ComputeSpec(Section):
    dtype: Literal["auto", "bf16", "tf32", "float32", "float64"] = Field(
        "auto",
        description=(
            "What matrices are multiplied in. Weights, gradients and what crosses a boundary are float32 "
            "(float64 with `float64`). `auto`: bf16 on GPUs that have it, float32 elsewhere. `tf32`: float32 on GPUs "
            "with products rounded to TF32."
        ),
    )
    compile: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "Whether the operators between products of matrices are compiled (torch.compile) before a stage works. "
            "`auto`: on CUDA GPUs."
        ),
    )
    recompute: Literal["auto", "none", "block", "stage"] = Field(
        "auto",
        description=(
            "What a stage computes again in the backward pass and does not keep: nothing, each block from its input, "
            "or the whole stage from the message it received. `auto`: nothing if what is kept of four microbatches for "
            "each stage from this one to the last fits the peer's memory, else the stage, or block by block where that "
            "does not fit either. Results are the same."
        ),
    )
    threads: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="CPU threads of a stage. Bit-identical results need the same number of threads."
    )
    loss_chunk: Annotated[int, Field(ge=1, le=1 << 24)] = Field(
        1024, description="Tokens whose logits are in memory at one time."
    )

    @property
    def stored(self) -> Literal["float32", "float64"]:
        """Type of weights, gradients and of what crosses a boundary."""
        return "float64" if self.dtype == "float64" else "float32"


class RunSpec(Section):
    """Everything about a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        "run", description="Name of the run and of its directory."
    )
    seed: Seed = Field(0, description="Seed of weights, U and the order of the data.")
    steps: Count = Field(description="Optimizer steps.")
    stages: int | list[int] | Literal["auto"] = Field(
        1, description="Number of stages (cut evenly), a list of layers per stage, or `auto` (cut to fit the peers)."
    )
    min_peers: Count = Field(2, description="`stages: auto`: peers that must have joined before the model is cut.")
    model: ModelSpec
    subspace: SubspaceSpec = Field(default_factory=SubspaceSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    groups: GroupsSpec = Field(default_factory=GroupsSpec)
    batch: BatchSpec = Field(default_factory=BatchSpec)
    data: DataSpec = Field(default_factory=DataSpec)
    tokenizer: TokenizerSpec = Field(default_factory=TokenizerSpec)
    eval: EvalSpec = Field(default_factory=EvalSpec)
    wire: WireSpec = Field(default_factory=WireSpec)
    snapshots: SnapshotSpec = Field(default_factory=SnapshotSpec)
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    compute: ComputeSpec = Field(default_factory=ComputeSpec)
    audit: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Share of all stages' steps that a spare recomputes, each in a step after a snapshot, to find who "
        "sends other numbers than it should (docs/audit.md). 0: nobody is audited.",
    )

    @field_validator("stages", mode="plain")
    @classmethod
    def _stages(cls, value: Any) -> Any:
        if value == "auto" or is_cut(value):
            return value
        raise PydanticCustomError(
            "stages",
            "must be a number of stages from 1, a list of layers per stage, or auto",
            {"fix": "write for example `stages: 4`, `stages: [3, 3, 2]` or `stages: auto`"},
        )

    @property
    def vocab_size(self) -> int:
        """V. Known once the spec is loaded (`resolve` fills it in)."""
        if self.tokenizer.vocab_size is None:
            raise ValueError("tokenizer.vocab_size is not resolved: load the spec with load_spec()")
        return self.tokenizer.vocab_size

    @property
    def form(self) -> type[Form]:
        """What the residual stream is made of."""
        return form_named(self.subspace.form)

    @property
    def layers_per_segment(self) -> list[int]:
        """Where a local stream ends and another anchor begins."""
        return layers_per_segment(self)

    @property
    def has_segments(self) -> bool:
        """Whether it matters what the segments are."""
        return self.form.has_local_stream or self.subspace.anchor == "segment"

    @property
    def anchor_width(self) -> int:
        """Numbers a token in the table of an anchor's change."""
        return self.subspace.anchor_rank or self.model.width

    @property
    def anchor_tokens(self) -> int:
        """Tokens whose rows make up an anchor. A single one is a part of the embedding, and stays that."""
        if self.subspace.anchor == "fixed" or len(self.layers_per_segment) == 1:
            return 1
        return ANCHOR_TOKENS if self.subspace.anchor_tokens is None else self.subspace.anchor_tokens

    @property
    def early_loss(self) -> float:
        """Weight, at the start, of the losses of all segments but the last."""
        if not self.has_segments or len(self.layers_per_segment) == 1:
            return 0.0
        return self.form.early_loss if self.subspace.early_loss is None else self.subspace.early_loss

    @property
    def boundary_width(self) -> int:
        """Numbers a token that cross a boundary."""
        return self.form.boundary_width(Sizes.of(self))

    def sha256(self) -> str:
        """Hash of the resolved spec: equal specs, equal runs."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
