"""What a run will need and how fast it will go, before anyone has joined: from the spec, a link and the peers' speed.

Pure. Memory and bytes are those of the code; time comes from playing a step through (`pipeline.py`). Left out are the
optimizer's own time and jitter, and what TCP does beyond its mean rate under loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from protomodels_cli.cost.activations import Computation, Recompute
from protomodels_cli.cost.line import reno_rate, wire_bytes
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.pipeline import StageCost, Wires, play
from protomodels_cli.cost.recompute import Picked, pick
from protomodels_cli.cost.time_to_loss import seconds_to_loss
from protomodels_cli.cost.traffic import id_bytes, message_bytes
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.cost.ways import assumed_loss, expected_loss
from protomodels_cli.spec.cut import layers_per_stage, spans
from protomodels_cli.spec.schema import LinkSpec, RunSpec

FRAME_BYTES = 24  # of a frame's own fields
SLACK = 1.1  # a link that adds no more than this to a step is not what holds it up
LEVEL = 1.02  # times to a loss that differ by less than this are as good as equal: forecasts do not tell them apart


@dataclass(frozen=True)
class Stage:
    layers: int
    memory: int  # bytes on its device, at most; where peers' memory is not known, the least that will do
    recompute: Recompute
    in_flight: int  # microbatches
    host_memory: int  # bytes that its codecs keep in the machine's own memory
    compute: float  # seconds a step
    line: float  # seconds a step that the peer's connection is busy, in the busier direction


@dataclass(frozen=True)
class Bottleneck:
    """What would shorten a step most if it took no time."""

    kind: Literal["compute", "bandwidth", "latency", "in_flight", "coordinator"]
    stage: int | None = None  # the slowest, where it is a matter of stages


@dataclass(frozen=True)
class Estimate:
    stages: list[Stage]
    bytes_per_step: dict[str, float]  # over one boundary, by leg, with headers
    step_seconds: float
    compute_seconds: float  # of a step if links took no time; the coordinator is still a round trip away
    wire_seconds: float  # bytes over bandwidth, of the busiest line
    tokens_per_s: float
    bubble: float  # share of the step for which the busiest stage does not compute


@dataclass(frozen=True)
class Forecast(Estimate):
    """With what holds the run up, which takes several times as long to say."""

    bottleneck: Bottleneck


def forecast(
    spec: RunSpec,
    link: LinkSpec,
    speed: float,
    cores: float = math.inf,
    windows: int | None = None,
    memory: int | None = None,
    computation: Computation | None = None,
) -> Forecast:
    """As `estimate`, and what would help most."""
    found, plan = _estimate(spec, link, speed, cores, windows, memory, computation)
    return Forecast(**vars(found), bottleneck=_bottleneck(plan, found))


def estimate(
    spec: RunSpec,
    link: LinkSpec,
    speed: float,
    cores: float = math.inf,
    windows: int | None = None,
    memory: int | None = None,
    computation: Computation | None = None,
) -> Estimate:
    """`speed` in operations a second of each peer; `cores` where they share a machine; `windows` is the number of
    samples in the data; `memory`: bytes that each peer has (default: enough to compute nothing again); `computation`:
    how they compute (default: whatever takes most memory)."""
    return _estimate(spec, link, speed, cores, windows, memory, computation)[0]


@dataclass(frozen=True)
class _Plan:
    """What a step is played from."""

    microbatches: int
    costs: list[StageCost]
    wires: Wires
    cores: float
    turn: float  # seconds of a report and its answer


def _estimate(
    spec: RunSpec,
    link: LinkSpec,
    speed: float,
    cores: float,
    windows: int | None,
    memory: int | None,
    computation: Computation | None,
) -> tuple[Estimate, _Plan]:
    cut, microbatches = spans(layers_per_stage(spec)), spec.batch.microbatches
    sizes = StageMemory(spec, windows)
    picked = _picked(sizes, cut, memory, computation)
    wires, free = _wires(spec, link), _wires(spec, LinkSpec())
    costs = _costs(spec, cut, speed, picked)
    turn = 2 * link.latency_s
    played, unshaped = play(costs, microbatches, wires, cores), play(costs, microbatches, free, cores)
    step = played.seconds + turn
    lines = _lines(len(cut), microbatches, wires)
    stages = []
    for i, (span, chosen) in enumerate(zip(cut, picked, strict=True)):
        least = sizes.total(span.start, span.stop, len(cut) - 1 - i, computation)
        total, on_host = least if memory is None else chosen.bytes, sizes.on_host(span.start, span.stop)
        stages.append(Stage(len(span), total, chosen.recompute, chosen.in_flight, on_host, played.busy[i], lines[i]))
    found = Estimate(
        stages=stages,
        bytes_per_step={
            "forward": wires.forward_bytes * microbatches * (len(cut) > 1),
            "backward": wires.backward_bytes * microbatches * (len(cut) > 1),
        },
        step_seconds=step,
        compute_seconds=unshaped.seconds + turn,
        wire_seconds=max(lines),
        tokens_per_s=spec.batch.size * spec.model.context / step,
        bubble=1 - max(played.busy) / step,
    )
    return found, _Plan(microbatches, costs, wires, cores, turn)


def seconds_by_link(spec: RunSpec, speed: float, memory: int | None = None) -> Callable[[LinkSpec], float]:
    """A forecast's `step_seconds` alone, for searches over links: what no link changes is worked out once."""
    cut = spans(layers_per_stage(spec))
    costs = _costs(spec, cut, speed, _picked(StageMemory(spec), cut, memory))
    return lambda link: play(costs, spec.batch.microbatches, _wires(spec, link)).seconds + 2 * link.latency_s


def least_seconds(spec: RunSpec, link: LinkSpec, speed: float) -> float:
    """What a step takes at least, without playing it through: every microbatch passes the slowest stage or line, and
    the first one has come there and the last one has to go back. Takes no time to say."""
    cut, n, wires = spans(layers_per_stage(spec)), spec.batch.microbatches, _wires(spec, link)
    costs = _costs(spec, cut, speed, [Picked("none", 1, 0, 0, "fits", 0)] * len(cut))
    way = 2 * wires.latency + 8 * (wires.forward_bytes + wires.backward_bytes) / wires.bits_per_second
    before, least = 0.0, max(_lines(len(cut), n, wires))
    for cost in costs:
        least = max(least, before + n * (cost.forward + cost.backward))
        before += cost.forward + cost.backward + way
    return least + 2 * link.latency_s


def _picked(
    sizes: StageMemory, cut: list[range], memory: int | None = None, computation: Computation | None = None
) -> list[Picked]:
    most = 1 << 62 if memory is None else memory
    return [pick(sizes, span.start, span.stop, len(cut) - 1 - i, computation, most) for i, span in enumerate(cut)]


def _wires(spec: RunSpec, link: LinkSpec) -> Wires:
    windows = spec.batch.size // spec.batch.microbatches
    ids = windows * (spec.model.context + 1) * id_bytes(spec)
    return Wires(
        forward_bytes=wire_bytes(message_bytes(spec, "forward") + ids + FRAME_BYTES),
        backward_bytes=wire_bytes(message_bytes(spec, "backward") + FRAME_BYTES),
        bits_per_second=link.bits_per_second,
        stream_bits_per_second=reno_rate(link),
        latency=link.latency_s,
    )


def _costs(spec: RunSpec, cut: list[range], speed: float, picked: list[Picked]) -> list[StageCost]:
    """Seconds of each stage for a microbatch: a third forward, the rest backward, and another third where it is
    computed again; the last stage does both at once, and has nothing of a whole stage to compute again."""
    flops, costs = unit_flops(spec), []
    tokens = spec.batch.size // spec.batch.microbatches * spec.model.context
    for i, span in enumerate(cut):
        layers, last = sum(flops[f"layers.{n}"] for n in span) * tokens / speed, i == len(cut) - 1
        again = layers / 3 if picked[i].recompute == "block" or (picked[i].recompute == "stage" and not last) else 0.0
        forward, backward = layers / 3, 2 * layers / 3 + again
        if last:
            forward, backward = forward + backward + flops["head"] * tokens / speed, 0.0
        costs.append(StageCost(forward, backward, limit=picked[i].in_flight))
    return costs


def _lines(stages: int, microbatches: int, wires: Wires) -> list[float]:
    """Seconds that each peer's connection carries a step's messages, in the busier direction."""

    def seconds(size: float) -> float:
        return microbatches * 8 * size / wires.bits_per_second

    found = []
    for i in range(stages):
        forward, backward = i < stages - 1, i > 0
        out = seconds(wires.forward_bytes) * forward + seconds(wires.backward_bytes) * backward
        into = seconds(wires.forward_bytes) * backward + seconds(wires.backward_bytes) * forward
        found.append(max(out, into))
    return found


def _bottleneck(plan: _Plan, found: Estimate) -> Bottleneck:
    """Computing, unless something else would help by more than a tenth."""
    n, wires = plan.microbatches, plan.wires
    lines, busy = [stage.line for stage in found.stages], [stage.compute for stage in found.stages]
    unlimited = replace(wires, bits_per_second=math.inf, stream_bits_per_second=math.inf)
    without = {
        Bottleneck("bandwidth", lines.index(max(lines))): (plan.costs, unlimited),
        Bottleneck("latency"): (plan.costs, replace(wires, latency=0.0)),
        Bottleneck("in_flight"): ([replace(cost, limit=n) for cost in plan.costs], wires),
    }
    seconds = {kind: play(stages, n, line, plan.cores).seconds + plan.turn for kind, (stages, line) in without.items()}
    seconds[Bottleneck("coordinator")] = found.step_seconds - plan.turn
    best = min(seconds, key=lambda kind: seconds[kind])
    if seconds[best] * SLACK < found.step_seconds:
        return best
    return Bottleneck("compute", busy.index(max(busy)))


@dataclass(frozen=True)
class Choice:
    """One way to cross the boundaries."""

    spec: RunSpec
    forecast: Estimate
    memory: int | None = None  # bytes that each peer has; None: enough

    @property
    def fits(self) -> bool:
        return self.memory is None or all(stage.memory <= self.memory for stage in self.forecast.stages)

    @property
    def loss(self) -> float | None:
        """Above dense's, as a share of it; None: nobody measured it."""
        return expected_loss(self.spec)

    @property
    def seconds_to_loss(self) -> float:
        """For every step that dense would take to the same loss."""
        return seconds_to_loss(self.forecast.step_seconds, assumed_loss(self.spec))

    @property
    def keeps_up(self) -> bool:
        return self.forecast.step_seconds <= SLACK * self.forecast.compute_seconds + 1e-9


def choices(
    candidates: Iterable[RunSpec],
    link: LinkSpec,
    speed: float,
    memory: int | None = None,
    computation: Computation | None = None,
) -> list[Choice]:
    """`candidates` by what they cost in loss: the first ones cost least."""
    return [
        Choice(spec, estimate(spec, link, speed, memory=memory, computation=computation), memory) for spec in candidates
    ]


def recommended(found: list[Choice], any_recipe: bool = False) -> Choice | None:
    """The way that is at dense's loss soonest, of those that fit and were measured (`any_recipe`: of all that fit). Of
    those within LEVEL of it the one with the least loss, and of equals the least compression. None: none fits."""
    found = [choice for choice in found if choice.fits and (any_recipe or choice.loss is not None)]
    if not found:
        return None
    soonest = min(choice.seconds_to_loss for choice in found)
    level = [choice for choice in found if choice.seconds_to_loss <= LEVEL * soonest]
    return min(level, key=lambda choice: assumed_loss(choice.spec))
