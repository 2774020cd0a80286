"""The fields of a run spec's parameter groups: how each kind of parameter starts and learns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from protomodels_cli.forms import Role
from protomodels_cli.spec.fields import BelowOne, Positive, Section

if TYPE_CHECKING:
    from protomodels_cli.spec.schema import RunSpec

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GroupSpec(Section):
    lr: Positive | None = Field(
        None, description="Peak learning rate; it rises and falls with the schedule. Default: optimizer.lr."
    )
    beta1: BelowOne | None = Field(None, description="AdamW: decay of the first moment. Default: optimizer.beta1.")
    beta2: BelowOne | None = Field(None, description="AdamW: decay of the second moment. Default: optimizer.beta2.")
    weight_decay: NotNegative | None = Field(None, description="Default: optimizer.weight_decay.")


class EmbeddingGroup(GroupSpec):
    """The trainable embedding."""

    std: NotNegative = Field(0.1, description="Standard deviation of the entries at the start.")


class HeadGroup(GroupSpec):
    """The matrix of the head, and those of segments' early heads."""

    std: NotNegative = Field(
        0.02, description="Standard deviation of the head's entries at the start. Early heads start at zero."
    )


class MatricesGroup(GroupSpec):
    """The blocks' matrices."""

    std: NotNegative = Field(0.02, description="Standard deviation of the entries at the start.")


class WritersGroup(GroupSpec):
    """The two matrices of a block that write to the stream, W_o and W_down."""

    lr: Positive | None = Field(
        None, description="Peak learning rate; it rises and falls with the schedule. Default: groups.matrices.lr."
    )
    beta1: BelowOne | None = Field(
        None, description="AdamW: decay of the first moment. Default: groups.matrices.beta1."
    )
    beta2: BelowOne | None = Field(
        None, description="AdamW: decay of the second moment. Default: groups.matrices.beta2."
    )
    weight_decay: NotNegative | None = Field(None, description="Default: groups.matrices.weight_decay.")
    std: NotNegative | None = Field(
        None,
        description="Standard deviation of the entries at the start; 0 is fine. Default: 1/√(2·layers) of "
        "groups.matrices.std.",
    )


class GainsGroup(GroupSpec):
    """The gains of all norms, which start at 1, and the taps of anchors, which start at 0."""

    weight_decay: NotNegative = Field(0.0, description="Decoupled weight decay.")


class AnchorsGroup(GroupSpec):
    """The trained change of an anchor, which starts at 0."""

    weight_decay: NotNegative = Field(0.0, description="Decoupled weight decay, on all rows in every step.")


class GroupsSpec(Section):
    """Parameter groups: what is not set here is as in `optimizer`."""

    embedding: EmbeddingGroup = Field(default_factory=EmbeddingGroup)
    anchors: AnchorsGroup = Field(default_factory=AnchorsGroup)
    head: HeadGroup = Field(default_factory=HeadGroup)
    gains: GainsGroup = Field(default_factory=GainsGroup)
    matrices: MatricesGroup = Field(default_factory=MatricesGroup)
    writers: WritersGroup = Field(default_factory=WritersGroup)

    def of(self, role: Role) -> GroupSpec:
        match role:
            case "embedding":
                return self.embedding
            case "anchor":
                return self.anchors
            case "head":
                return self.head
            case "gain":
                return self.gains
            case "matrix":
                return self.matrices
            case "writer":
                return self.writers


@dataclass(frozen=True)
class Settings:
    """What an optimizer's rule needs to know of a parameter's group."""

    rate: float  # in optimizer.lr, which is what the schedule moves
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    momentum: float


def settings(spec: RunSpec, role: Role) -> Settings:
    o, group = spec.optimizer, spec.groups.of(role)
    above = spec.groups.matrices if role == "writer" else group

    def first(*values: float | None) -> float:
        return next(value for value in values if value is not None)

    return Settings(
        rate=first(group.lr, above.lr, o.lr) / o.lr,
        weight_decay=first(group.weight_decay, above.weight_decay, o.weight_decay),
        beta1=first(group.beta1, above.beta1, o.beta1),
        beta2=first(group.beta2, above.beta2, o.beta2),
        eps=o.eps,
        momentum=o.momentum,
    )


def writer_std(spec: RunSpec) -> float:
    """The standard deviation of W_o and W_down at the start."""
    std = spec.groups.writers.std
    return spec.groups.matrices.std / math.sqrt(2 * spec.model.layers) if std is None else std
