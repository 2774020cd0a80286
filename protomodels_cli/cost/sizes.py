"""What a model has and computes, beside the dense model of equal shape: tables apart from what learns to compute."""

from __future__ import annotations

from dataclasses import dataclass

from protomodels_cli.cost.units import (
    anchor_parameters,
    block_parameters,
    early_parameters,
    unit_flops,
    unit_parameters,
)
from protomodels_cli.forms import Dense
from protomodels_cli.spec.schema import RunSpec


@dataclass(frozen=True)
class ModelSize:
    """Parameters, and operations a token, forward and backward."""

    hidden: int
    blocks: int
    embedding: int
    head: int
    anchors: int  # the tables of all segments together
    early: int  # heads of segments, which end with the training
    block_flops: float
    head_flops: float

    @classmethod
    def of(cls, spec: RunSpec) -> ModelSize:
        parameters, flops, hidden = unit_parameters(spec), unit_flops(spec), spec.model.hidden
        assert isinstance(hidden, int)
        return cls(
            hidden=hidden,
            blocks=block_parameters(spec),
            embedding=parameters["embed"],
            head=parameters["head"],
            anchors=anchor_parameters(spec),
            early=early_parameters(spec),
            block_flops=sum(flops.values()) - flops["head"],
            head_flops=flops["head"],
        )


def dense_model(spec: RunSpec) -> RunSpec:
    """The dense model of equal shape: with the hidden width that `hidden: auto` goes by, or the same one."""
    hidden = spec.model.dense_hidden or spec.model.hidden
    subspace = spec.subspace.model_copy(update={"form": Dense.name, "anchor": "fixed", "early_loss": 0.0})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"hidden": hidden}), "subspace": subspace})
