"""The fields of a run spec's optimizer, and of its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protomodels_cli.spec.fields import BelowOne, Count, Positive, Section, Share, Whole

# Numbers of a parameter that a step has in working memory at one time, unless its rule needs the whole matrix (Muon).
STEP_NUMBERS = 1 << 24
TOGETHER_NUMBERS = 1 << 22  # of matrices that Muon moves together on a GPU


class ScheduleSpec(Section):
    """The learning rate over the run."""

    warmup_steps: Whole = Field(0, description="Steps of linear warm-up from 0.")
    decay: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape of the decay.")
    decay_steps: Count | None = Field(
        None,
        description="Steps of decay, at the end of the run; the rate is constant before. Default: all after warm-up.",
    )
    final_fraction: Share = Field(0.1, description="Learning rate at the last step, as a share of lr.")


class OptimizerSpec(Section):
    name: Literal["muon", "adamw", "row_adamw"] = Field(
        "muon",
        description=(
            "`muon`: Muon for the blocks' matrices, AdamW for the rest (row AdamW for a constrained embedding). "
            "`row_adamw` is for the constrained form, `adamw` for the others."
        ),
    )
    lr: Positive = Field(
        1e-3,
        description="Peak learning rate, for AdamW and Muon alike (Muon's updates are scaled to the RMS of AdamW's).",
    )
    beta1: BelowOne = Field(0.9, description="AdamW: decay of the first moment.")
    beta2: BelowOne = Field(0.95, description="AdamW: decay of the second moment.")
    eps: Positive = Field(1e-8, description="AdamW: added to the root of the second moment.")
    momentum: BelowOne = Field(0.95, description="Muon: Nesterov momentum.")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.01, description="Decoupled weight decay, on matrices and tables."
    )
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.0, description="Largest norm of the whole (projected) gradient; 0: no clipping."
    )
    moments: Literal["float32", "bf16"] = Field(
        "float32",
        description=(
            "What the moments of matrices are kept in (float64 where weights are). `bf16`: half the memory, rounded "
            "stochastically; a step's arithmetic stays float32, and so do moments of which there is one a row."
        ),
    )
    tables: Literal["adamw", "row_adamw"] = Field(
        "adamw",
        description=(
            "What moves the large tables, embedding and head. `row_adamw` keeps one second moment a row: half of "
            "AdamW's memory. A constrained embedding has it in any case."
        ),
    )
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec)
