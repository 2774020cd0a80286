"""Why the joined peers cannot hold the model, as data: what placement.py finds out, and an owner has to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protomodels_cli.facts import Fact

Bytes = int


@dataclass(frozen=True)
class InFlight:
    """Memory that a spec could do without: most of a stage's is for microbatches."""

    size: Bytes
    more_microbatches: bool  # batch.microbatches can be raised
    recompute: bool  # compute.recompute can be set to auto


@dataclass(frozen=True)
class Layers:
    """What a stage is made of."""

    first: int
    end: int
    head: bool  # the last stage's


@dataclass(frozen=True)
class TooFewPeers(Fact):
    joined: int
    needed: int
    at_least: bool = False  # more would do as well
    unusable: int = 0  # further peers, whose measured speed is no positive number
    kind: Literal["too_few_peers"] = "too_few_peers"


@dataclass(frozen=True)
class StageTooLarge(Fact):
    """For every joined peer. A cut that is not fixed has an end that is too large, however it is cut."""

    stage: int | Literal["first", "last"]
    layers: Layers
    need: Bytes
    largest: Bytes  # that a peer has
    in_flight: InFlight | None = None
    unusable: int = 0
    kind: Literal["stage_too_large"] = "stage_too_large"


@dataclass(frozen=True)
class ModelTooLarge(Fact):
    """For one stage, and there can be no more."""

    need: Bytes
    largest: Bytes
    more_peers_help: bool
    in_flight: InFlight | None = None
    unusable: int = 0
    kind: Literal["model_too_large"] = "model_too_large"


@dataclass(frozen=True)
class TooFewLargePeers(Fact):
    stages: int  # that need this much or more each
    need: Bytes
    peers: int  # that have it
    next_largest: Bytes  # what the largest of the others has
    in_flight: InFlight | None = None
    unusable: int = 0
    kind: Literal["too_few_large_peers"] = "too_few_large_peers"


@dataclass(frozen=True)
class EndsTooLarge(Fact):
    """One peer has the memory for the first stage or for the last, and no other has."""

    first: Bytes
    last: Bytes
    unusable: int = 0
    kind: Literal["ends_too_large"] = "ends_too_large"


@dataclass(frozen=True)
class TooFewLayersFit(Fact):
    peers: int
    fit: int  # layers that they have the memory for, cut into `stages`
    layers: int
    stages: int
    first_stage: Bytes  # with as few layers as can be
    in_flight: InFlight | None = None
    first_layers: int = 1  # which are that many: a segment's, where a stage is whole segments
    unusable: int = 0
    kind: Literal["too_few_layers_fit"] = "too_few_layers_fit"


@dataclass(frozen=True)
class HostMemoryTooSmall(Fact):
    """The devices could hold the stages, and the machines' own memory cannot hold what their codecs keep there."""

    need: Bytes  # of the stage that needs most of it
    unusable: int = 0
    kind: Literal["host_memory_too_small"] = "host_memory_too_small"


NoPlacement = (
    TooFewPeers | StageTooLarge | ModelTooLarge | TooFewLargePeers | EndsTooLarge | TooFewLayersFit | HostMemoryTooSmall
)
