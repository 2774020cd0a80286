"""The fields of a run spec's model, and of what crosses its boundaries."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from protomodels_cli.forms import FORMS, form_named
from protomodels_cli.plugins import UnknownName
from protomodels_cli.spec.fields import LARGEST, Count, Positive, Section, Seed, Size, Whole
from protomodels_cli.spec.hidden import is_hidden


def is_cut(value: Any) -> bool:
    """A number of pieces, or a list of layers in each."""

    def is_count(v: Any) -> bool:
        return isinstance(v, int) and not isinstance(v, bool) and v >= 1

    return is_count(value) or (isinstance(value, list) and bool(value) and all(map(is_count, value)))


class ModelSpec(Section):
    """The transformer's shape: a LLaMA decoder (Qwen3's with qk_norm)."""

    init: str | None = Field(
        None,
        description="Folder of a Hugging Face checkpoint (Llama or Qwen3) to start from, in the form `dense`: the "
        "model's shape and the vocabulary are taken from it. Default: start from new weights.",
    )
    layers: Annotated[int, Field(ge=1, le=1 << 16)] = Field(description="Transformer blocks.")
    width: Size = Field(description="Width d of the residual stream.")
    heads: Size = Field(description="Attention heads.")
    kv_heads: Size | None = Field(None, description="Key/value heads (grouped-query attention). Default: heads.")
    head_dim: Size | None = Field(None, description="Width of one head. Default: width / heads.")
    hidden: int | str | None = Field(
        None,
        description="Width of the feed-forward block. `auto`: the one with which all blocks together have as many "
        "parameters as those of a dense model with the default; `auto:N`: as those of a dense model with N. It is "
        "rounded to a multiple of 32 (of 8 where width is below 256). Default: 8/3 · width, rounded up to a multiple "
        "of 32.",
    )
    dense_hidden: Size | None = Field(
        None,
        description="Width of the feed-forward block in the dense model that this one is compared with. Default: what "
        "`hidden: auto` goes by, else `hidden`.",
    )
    context: Size = Field(128, description="Tokens in a training window.")
    segments: int | list[int] | None = Field(
        None,
        description="Segments of the model (a number, cut evenly, or a list of layers per segment): where the local "
        "stream of `two_stream` ends, and which anchor a layer reads. A stage is whole segments. Default: the stages.",
    )
    qk_norm: bool = Field(False, description="RMSNorm on queries and keys (exports as Qwen3 instead of Llama).")
    rope_theta: Positive = Field(10000.0, description="Base of the rotary positions.")
    norm_eps: Positive = Field(1e-5, description="Epsilon of every RMSNorm.")

    @field_validator("hidden", mode="plain")
    @classmethod
    def _hidden(cls, value: Any) -> Any:
        if value is None or is_hidden(value):
            return value
        raise PydanticCustomError(
            "hidden",
            f"must be a width from 1 to {LARGEST}, auto, or auto:N with the hidden width N of a dense model",
            {"fix": "write for example `hidden: 1376`, `hidden: auto` or `hidden: auto:1376`"},
        )

    @field_validator("segments", mode="plain")
    @classmethod
    def _segments(cls, value: Any) -> Any:
        if value is None or is_cut(value):
            return value
        raise PydanticCustomError(
            "segments",
            "must be a number of segments from 1, or a list of layers per segment",
            {"fix": "write for example `segments: 4` or `segments: [3, 3, 2]`"},
        )


class TFixedSpec(Section):
    """The frozen high-rank part of the embedding, ±scale, one bit an entry."""

    scale: Positive = Field(
        0.1, description="Magnitude of the entries. It matters a lot, and small values are best: see docs/method.md."
    )
    seed: Seed = Field(0, description="Seed of the signs of the entries.")


class UpdateSpec(Section):
    """Moving the subspace towards the gradients (Grassmann steps)."""

    interval: Whole = Field(0, description="Steps between updates of U; 0 keeps U for the whole run.")
    window: Count = Field(10, description="Steps before an update whose gradients the update uses.")
    step_size: Positive = Field(
        0.5,
        description="Length η of an inner step, with A divided by its largest eigenvalue. Values from 1 on overshoot.",
    )
    inner_steps: Count = Field(1, description="Inner steps of one update.")
    move: Literal["transport", "project"] = Field(
        "transport",
        description="How weights follow U: `transport` keeps coordinates, `project` keeps what lies in the new span.",
    )
    delay: Whole = Field(2, description="Steps between computing a new U and all stages switching to it.")


def _forms_in_words() -> str:
    forms = ", ".join(f"`{name}` {form.about}" for name, form in FORMS.builtin.items())
    return f"{forms}. Installed packages may add others (entry points of `{FORMS.group}`)."


class SubspaceSpec(Section):
    """What crosses a boundary between stages."""

    form: str = Field("two_stream", description=_forms_in_words())
    k: Size = Field(16, description="Numbers per token that cross a boundary (unused by `dense`, which sends width).")
    anchor: Literal["fixed", "segment"] = Field(
        "segment",
        description="What a stage adds to the stream for a token by itself. `fixed`: T_fixed (`dense`: nothing). "
        "`segment`: besides a change that starts at 0, which each segment trains for itself: a table of vocabulary × "
        "anchor_rank numbers for each segment, and no bytes on the wire. Default: `segment` with `two_stream`, `fixed` "
        "with the other forms.",
    )
    anchor_rank: Size | None = Field(
        None,
        description="Numbers a token in a segment's table of changes, which a fixed random matrix lifts to the width. "
        "Default: the width, and no such matrix.",
    )
    anchor_tokens: Size | None = Field(
        None,
        description="Tokens whose rows make up a trained anchor: a token's own and those before it, which have a "
        "trained weight for each channel that starts at 0. 1: its own alone, as with a single segment. Default: 4.",
    )
    early_loss: Annotated[float, Field(ge=0, le=10)] | None = Field(
        None,
        description="Weight of the loss that every segment but the last has of its own, by a small head on what it "
        "sends; it falls linearly to 0 at half of the steps. The heads are trained where they are, send nothing and "
        "are not exported. Default: 0.3 with `two_stream`, 0 with the other forms.",
    )
    unconstrained_layers: Whole | None = Field(
        None,
        description="How many of the last layers write outside S; all must be in the last stage (unused by `dense`). "
        "Default: 1; with `two_stream` always the layers of the last segment.",
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

    @model_validator(mode="before")
    @classmethod
    def _anchor(cls, fields: Any) -> Any:
        """The default follows from the form."""
        if not isinstance(fields, dict) or "anchor" in fields or fields.get("form") not in FORMS.names:
            return fields
        return fields | {"anchor": "segment" if form_named(fields["form"]).trains_anchors else "fixed"}

    @field_validator("form", mode="plain")
    @classmethod
    def _form(cls, value: Any) -> Any:
        try:
            form_named(str(value))
        except UnknownName:
            raise PydanticCustomError("word", "must be an installed form", {"words": FORMS.names}) from None
        return value

    @property
    def has_basis(self) -> bool:
        """Is there a U that all stages must share, and a T_fixed?"""
        return form_named(self.form).has_basis
