"""Why the joined peers cannot hold the model, in words."""

from __future__ import annotations

from typing import assert_never

from protomodels_cli.coordinator import no_placement as lacks
from protomodels_cli.quantities import size


def no_placement(what: lacks.NoPlacement) -> str:
    match what:
        case lacks.TooFewPeers(joined, needed, at_least):
            return f"peers: {joined} of {'at least ' if at_least else ''}{needed} {_have(joined)} joined"
        case lacks.StageTooLarge(stage, layers, need, largest, in_flight):
            part = f"stage {stage} ({_contents(layers)})"
            if isinstance(stage, str):
                part = f"the {stage} stage ({_contents(layers)} at the least)"
            return _nobody_has(part, need, largest) + _hint(in_flight)
        case lacks.ModelTooLarge(need, largest, more_peers_help, in_flight):
            more = "; more peers could share the model" if more_peers_help else ""
            return _nobody_has("the whole model in one stage", need, largest) + more + _hint(in_flight)
        case lacks.TooFewLargePeers(stages, need, peers, next_largest, in_flight):
            return (
                f"larger peers: {stages} of the stages need {_sizes(need, next_largest)[0]} or more each, and only "
                f"{peers} of the joined peers {_have(peers)} that much" + _hint(in_flight)
            )
        case lacks.EndsTooLarge(first, last):
            return (
                f"larger peers: the first stage needs at least {size(first)} and the last {size(last)}, and no two of "
                "the joined peers have that"
            )
        case lacks.TooFewLayersFit(peers, fit, layers, stages, first_stage, in_flight, first_layers):
            least = "one layer" if first_layers == 1 else f"one segment of {first_layers} layers"
            return (
                f"more or larger peers: the {peers} joined peers have memory for {fit} of the {layers} layers; "
                f"cut into {stages}, the first stage takes {size(first_stage)} with {least}" + _hint(in_flight)
            )
        case lacks.HostMemoryTooSmall(need):
            return (
                f"peers with more host memory: a stage needs up to {size(need)} of it for codecs, besides the "
                "memory of the device, and too few of the joined peers have that"
            )
        case _:
            assert_never(what)


def _nobody_has(part: str, need: int, have: int) -> str:
    needed, largest = _sizes(need, have)
    return f"a larger peer: no joined peer has the {needed} that {part} needs, the largest has {largest}"


def _sizes(need: int, have: int) -> tuple[str, str]:
    """Two sizes that differ, such that one can see it."""
    if size(need) != size(have):
        return size(need), size(have)
    return f"{need:,} bytes", f"{have:,}"


def _hint(in_flight: lacks.InFlight | None) -> str:
    if in_flight is None:
        return ""
    levers = ["raise batch.microbatches"] * in_flight.more_microbatches
    levers += ["set compute.recompute to auto"] * in_flight.recompute
    return f" ({size(in_flight.size)} are for microbatches: {' or '.join(levers)})"


def _contents(layers: lacks.Layers) -> str:
    words = [f"layer {layers.first}" if layers.end - layers.first == 1 else f"layers {layers.first}–{layers.end - 1}"]
    if layers.first == 0:
        words.insert(0, "the embedding")
    if layers.head:
        words.append("the head")
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _have(count: int) -> str:
    return "has" if count == 1 else "have"
