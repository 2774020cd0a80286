"""The fields of a run spec, their defaults and their single-field rules.

Rules that tie two fields together are in `checks.py`. Names here are the names used everywhere: in the
proto, the code, the logs and the docs. docs/spec.md is made from this file (`scripts/docs.sh`).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from protomodels_cli.codecs.base import CodecError
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.forms import FORMS, Form, Sizes, form_named
from protomodels_cli.plugins import UnknownName
from protomodels_cli.spec.units import bits_per_second, seconds

# Bounds far above any real run: what lies beyond is a slip of the keyboard, and would be felt as a hang or an overflow.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Whole = Annotated[int, Field(ge=0, le=1_000_000_000)]
Size = Annotated[int, Field(ge=1, le=1 << 24)]  # of one dimension of a tensor; token ids have at most three bytes
Bytes = Annotated[int, Field(ge=1, le=1 << 62)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSpec(Section):
    """The transformer's shape: a LLaMA decoder (Qwen3's with qk_norm)."""

    layers: Annotated[int, Field(ge=1, le=1 << 16)] = Field(description="Transformer blocks.")
    width: Size = Field(description="Width d of the residual stream.")
    heads: Size = Field(description="Attention heads.")
    kv_heads: Size | None = Field(None, description="Key/value heads (grouped-query attention). Default: heads.")
    head_dim: Size | None = Field(None, description="Width of one head. Default: width / heads.")
    hidden: Size | None = Field(
        None,
        description="Width of the feed-forward block. Default: 8/3 · width, rounded up to a multiple of 32.",
    )
    context: Size = Field(128, description="Tokens in a training window.")
    qk_norm: bool = Field(False, description="RMSNorm on queries and keys (exports as Qwen3 instead of Llama).")
    rope_theta: Positive = Field(10000.0, description="Base of the rotary positions.")
    norm_eps: Positive = Field(1e-5, description="Epsilon of every RMSNorm.")
    init_std: Positive = Field(
        0.02, description="Standard deviation of new weights; W_o and W_down get 1/√(2·layers) of it."
    )
    embedding_std: Positive = Field(0.1, description="Standard deviation of the trainable embedding's entries.")


class TFixedSpec(Section):
    """The frozen high-rank part of the embedding, ±scale, one bit an entry."""

    scale: Positive = Field(
        0.1, description="Magnitude of the entries. Matters a great deal, and small is good: see docs/method.md."
    )
    seed: Seed = Field(0, description="Seed of its counter-based bits.")


class UpdateSpec(Section):
    """Moving the subspace towards the gradients (Grassmann steps)."""

    interval: Whole = Field(0, description="Steps between updates of U; 0 keeps U for the whole run.")
    window: Count = Field(10, description="The last steps before an update whose gradients it sees.")
    step_size: Positive = Field(
        0.5, description="Length η of an inner step, with A divided by its largest eigenvalue. From 1 on it overshoots."
    )
    inner_steps: Count = Field(1, description="Inner steps of one update.")
    move: Literal["transport", "project"] = Field(
        "transport",
        description="How weights follow U: `transport` keeps coordinates, `project` what lies in the new span.",
    )
    delay: Whole = Field(2, description="Steps between computing a new U and all stages switching to it.")


def _forms_in_words() -> str:
    forms = ", ".join(f"`{name}` {form.about}" for name, form in FORMS.builtin.items())
    return f"{forms}. Installed packages may add others (entry points of `{FORMS.group}`)."


class SubspaceSpec(Section):
    """What crosses a boundary between stages."""

    form: str = Field("reparam", description=_forms_in_words())
    k: Size = Field(16, description="Numbers a token sent over a boundary (unused by `dense`, which sends width).")
    unconstrained_layers: Whole = Field(
        1, description="Last layers that write outside S; all must be in the last stage (unused by `dense`)."
    )
    t_fixed: TFixedSpec = Field(default_factory=TFixedSpec)
    update: UpdateSpec = Field(default_factory=UpdateSpec)
    sync_interval: Count = Field(
        100, description="Steps between two checks that every stage uses the same bytes of U and T_fixed."
    )
    reproject_interval: Whole = Field(
        1000,
        description="Steps between re-projections of constrained weights onto S, against rounding; 0: never.",
    )

    @field_validator("form", mode="plain")
    @classmethod
    def _form(cls, value: Any) -> Any:
        try:
            form_named(str(value))
        except UnknownName:
            raise PydanticCustomError("word", "must be a form that is installed", {"words": FORMS.names}) from None
        return value

    @property
    def has_basis(self) -> bool:
        """Is there a U that all stages must share, and a T_fixed?"""
        return form_named(self.form).has_basis


class ScheduleSpec(Section):
    """The learning rate over the run."""

    warmup_steps: Whole = Field(0, description="Steps of linear rise from 0.")
    decay: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape of the fall.")
    decay_steps: Count | None = Field(
        None,
        description="Length of the fall, at the end of the run; before it the rate holds. Default: all after warm-up.",
    )
    final_fraction: Share = Field(0.1, description="Share of lr that is left at the last step.")


class OptimizerSpec(Section):
    name: Literal["muon", "adamw", "row_adamw"] = Field(
        "muon",
        description=(
            "`muon`: Muon for the blocks' matrices, AdamW for the rest (row AdamW for a constrained embedding). "
            "`row_adamw` is for the constrained form, `adamw` for the others."
        ),
    )
    lr: Positive = Field(
        1e-3, description="Peak learning rate, of AdamW and Muon alike (Muon's is matched to AdamW's RMS)."
    )
    beta1: BelowOne = Field(0.9, description="AdamW: decay of the first moment.")
    beta2: BelowOne = Field(0.95, description="AdamW: decay of the second moment.")
    eps: Positive = Field(1e-8, description="AdamW: added to the root of the second moment.")
    momentum: BelowOne = Field(0.95, description="Muon: Nesterov momentum.")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.01, description="Decoupled weight decay, on matrices only."
    )
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.0, description="Largest norm of the whole (projected) gradient; 0: no clipping."
    )
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec)


class BatchSpec(Section):
    size: Size = Field(16, description="Windows in a step.")
    microbatches: Size = Field(4, description="Parts a step's batch is streamed in; must divide size.")
    in_flight: Count | None = Field(
        None,
        description=(
            "Microbatches a stage may hold between their forward and their backward; bounds its memory. "
            "Default: twice the number of stages from it to the last."
        ),
    )


class DataSpec(Section):
    """What is trained on."""

    source: Literal["builtin", "text", "jsonl", "bin", "parquet"] = Field(
        "builtin",
        description=(
            "`builtin`: Python's own documentation and library sources. `bin`: token shards as nanoGPT "
            "(bare uint16) or modded-nanogpt (1 KiB header) write them."
        ),
    )
    files: list[str] = Field(default_factory=list, description="Paths or globs, relative to the spec file.")
    val_files: list[str] = Field(
        default_factory=list, description="Held-out files. Default: val_fraction of the pieces of `files`."
    )
    field: str = Field("text", description="jsonl, parquet: the field or column that holds the text.")
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02, description="Share held out where val_files is empty."
    )
    max_bytes: Bytes | None = Field(None, description="Stop reading text after this many bytes.")
    sampling: Literal["epochs", "random"] = Field(
        "epochs",
        description="`epochs`: every window once per epoch, in a seeded order. `random`: windows from anywhere.",
    )
    cache_dir: str | None = Field(
        None, description="Where tokenised shards are kept. Default: $PMTRAIN_CACHE or ~/.cache/pmtrain."
    )


class TokenizerSpec(Section):
    kind: Literal["bytes", "bpe", "file", "none"] = Field(
        "bpe",
        description="`bytes`; `bpe` trained on the data; `file`: a tokenizer.json; `none`: the data are ids (bin).",
    )
    vocab_size: Size | None = Field(
        None,
        description="Default: 256 for bytes, 4096 for bpe, read from the file for `file`. Required for `none`.",
    )
    file: str | None = Field(None, description="The tokenizer.json, relative to the spec file.")


class EvalSpec(Section):
    interval: Whole = Field(100, description="Steps between evaluations on held-out windows; 0: only at the end.")
    windows: Count = Field(64, description="Held-out windows used; the same ones every time.")


def _checked_bandwidth(value: str) -> str:
    try:
        number = bits_per_second(value)
    except ValueError as e:
        raise PydanticCustomError("quantity", str(e), {"fix": "write for example 80mbit"}) from None
    if number <= 0:
        raise PydanticCustomError("quantity", "must be above 0", {"fix": "leave it out for no limit"})
    return value


class LinkSpec(Section):
    """An emulated internet connection of every peer, inside the transport; its links to both neighbours share it.

    For example `{bandwidth: 80mbit, latency: 25ms, jitter: 2ms, loss: 0}`. What goes to the coordinator is not slowed.
    """

    bandwidth: str | None = Field(None, description="Each way, as `80mbit` or `1gbit`. Default: whatever there is.")
    latency: str = Field("0ms", description="One way, from peer to peer.")
    jitter: str = Field("0ms", description="The latency varies by up to this, either way. Order is kept.")
    loss: BelowOne = Field(
        0.0, description="Share of packets lost: slows a connection as it would TCP (Reno) and delays what was lost."
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
        return f"{self.bandwidth or 'any bandwidth'}, {self.latency} ± {self.jitter}, {100 * self.loss:g} % lost"

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
        "fp32",
        description="Codec of activations: a base, feedback on top of it if wanted, then packing. "
        "See the table at the end and docs/codecs.md.",
    )
    backward: str = Field("fp32", description="Codec of gradients, likewise.")
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
    interval: Whole = Field(
        100,
        description="Steps between snapshots of all stages, which are what is left after a crash; 0: only at the end.",
    )
    keep: Count = Field(2, description="Newest complete snapshots kept, by the coordinator and by the peers.")
    max_bandwidth: str | None = Field(
        None, description="What a peer may use to hand in its part, as `5mbit`. Default: whatever there is."
    )
    warm_spares: bool = Field(
        False,
        description="Spares fetch every complete snapshot ahead, all stages of it, so that one takes a stage over "
        "without waiting for its part. It costs each the disk, and the coordinator a copy for each.",
    )
    copy_to: str | None = Field(
        None,
        description="Where the coordinator also puts every complete snapshot: a folder or any URL that fsspec knows, "
        "as `s3://bucket/runs`. A part that is damaged here is brought back from there.",
    )

    @field_validator("max_bandwidth")
    @classmethod
    def _bandwidth(cls, value: str | None) -> str | None:
        return None if value is None else _checked_bandwidth(value)

    @property
    def bits_per_second(self) -> float | None:
        return None if self.max_bandwidth is None else bits_per_second(self.max_bandwidth)


class LimitsSpec(Section):
    nonfinite_steps: Count = Field(
        5,
        description="Steps in a row skipped for a non-finite loss or gradient at which the run pauses.",
    )
    nonfinite_action: Literal["pause", "return"] = Field(
        "pause",
        description="What then: `pause`, or `return` to a snapshot from before, once, and pause if it comes back.",
    )
    lease_seconds: Annotated[float, Field(ge=1, le=3600)] = Field(
        5.0,
        description="A peer that falls silent is taken for gone within this time, and not before four fifths of it.",
    )
    build_seconds: Positive = Field(
        300.0,
        description="Time for a peer to build its stage from the seed; then it is dismissed and another is asked. "
        "One that restores its stage from a snapshot has no such limit.",
    )
    reuse_seconds: Positive = Field(
        300.0,
        description="Time for a peer to go on with the stage that it has in memory, when others come or go; then it is "
        "dismissed. It finishes the piece of work that it is at first.",
    )
    link_seconds: Positive = Field(
        300.0,
        description="Time for neighbours to open their links; then all links go through the coordinator, and whoever "
        "has not opened them after the same time again is dismissed.",
    )
    device_seconds: Positive = Field(
        600.0,
        description="A device that is at one piece of work (a microbatch, the building of its stage) for longer is "
        "taken to hang: its peer says so and leaves.",
    )


class ComputeSpec(Section):
    dtype: Literal["float32", "float64"] = Field("float32", description="Type of weights and activations.")
    threads: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="CPU threads of a stage. Equal numbers need equal threads."
    )
    loss_chunk: Annotated[int, Field(ge=1, le=1 << 24)] = Field(
        1024, description="Tokens whose logits exist at one time."
    )


class RunSpec(Section):
    """Everything about a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        "run", description="Names the run directory."
    )
    seed: Seed = Field(0, description="Seed of weights, U and the order of the data.")
    steps: Count = Field(description="Optimizer steps.")
    stages: int | list[int] | Literal["auto"] = Field(
        1, description="How many stages (cut evenly), a list of layers per stage, or `auto`."
    )
    min_peers: Count = Field(
        2, description="Peers that must have joined before `stages: auto` cuts the model to fit them."
    )
    model: ModelSpec
    subspace: SubspaceSpec = Field(default_factory=SubspaceSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    batch: BatchSpec = Field(default_factory=BatchSpec)
    data: DataSpec = Field(default_factory=DataSpec)
    tokenizer: TokenizerSpec = Field(default_factory=TokenizerSpec)
    eval: EvalSpec = Field(default_factory=EvalSpec)
    wire: WireSpec = Field(default_factory=WireSpec)
    snapshots: SnapshotSpec = Field(default_factory=SnapshotSpec)
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    compute: ComputeSpec = Field(default_factory=ComputeSpec)

    @field_validator("stages", mode="plain")
    @classmethod
    def _stages(cls, value: Any) -> Any:
        def count(v: Any) -> bool:
            return isinstance(v, int) and not isinstance(v, bool) and v >= 1

        if value == "auto" or count(value) or (isinstance(value, list) and value and all(map(count, value))):
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
    def boundary_width(self) -> int:
        """Numbers a token that cross a boundary."""
        return self.form.boundary_width(Sizes.of(self))

    def sha256(self) -> str:
        """Hash of the resolved spec: equal specs, equal runs."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
