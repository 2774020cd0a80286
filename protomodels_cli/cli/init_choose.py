"""From what an owner says of a model and its peers to a spec, through the planner. Pure: no files, no torch.

It must not know how the spec is written down, nor how the answers were asked for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from protomodels_cli.cli.init_shape import MOST_LAYERS, Shape, shape_of
from protomodels_cli.cli.run_plan import candidates, cut_for
from protomodels_cli.cost.forecast import LEVEL, Forecast, forecast, least_seconds, seconds_by_link
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.saving import Saving, forecast_saving
from protomodels_cli.cost.time_to_loss import seconds_to_loss
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.cost.ways import assumed_loss, expected_loss
from protomodels_cli.forms import Dense
from protomodels_cli.spec.cut import layers_per_stage, spans
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import LinkSpec, RunSpec

TOKENS_EACH = 20  # of training for a parameter: about where more parameters and more tokens are worth the same
FILLING = 4  # microbatches for each stage: the pipeline stands still for less than a fifth of a step
TOKENS_AT_ONCE = 2048  # in a microbatch
WORTH_IT = 1.05  # times as soon at the loss is what a saving of memory must make the run
NARROWER = 0.8  # of dense's operations
OFF_SIZE = 0.1  # that a shape may miss the size by, where layers are made to suit the stages
FEW = 16  # numbers of stages up to this one are all tried
LONGEST = 365 * 86_400.0  # seconds: no group keeps its machines at one run for longer


@dataclass(frozen=True)
class Answers:
    name: str
    parameters: float
    data: dict[str, Any]  # the section of the spec
    link: LinkSpec
    peers: int
    memory: int  # bytes, of the peer that has least
    speed: float  # operations a second of each
    steps: int | None = None  # None: TOKENS_EACH
    vocabulary: int | None = None  # of ready tokens
    any_recipe: bool = False  # also what nobody measured


@dataclass(frozen=True)
class Thrift:
    """What is given up for memory, the first for nothing. Fields of the spec."""

    optimizer: dict[str, str] = field(default_factory=dict)
    one_window: bool = False


THRIFT = (
    Thrift(),
    Thrift({"tables": "row_adamw", "moments": "bf16"}),
    Thrift({"tables": "row_adamw", "moments": "bf16"}, True),
)


@dataclass(frozen=True)
class Found:
    """The best that was found: how many stages, and how they cross their boundaries."""

    stages: int
    shape: Shape
    thrift: Thrift
    spec: RunSpec  # with a fixed cut
    step_seconds: float
    cost: float  # seconds to the loss, for each token and each parameter of the dense model


@dataclass(frozen=True)
class Chosen:
    answers: Answers
    shape: Shape
    stages: int
    thrift: Thrift
    spec: RunSpec  # as it will be written
    cut: RunSpec  # the same, cut for these peers
    forecast: Forecast
    saving: Saving

    @property
    def seconds(self) -> float:
        """Of the whole run, where nothing fails."""
        return self.spec.steps * self.forecast.step_seconds

    @property
    def spares(self) -> int:
        return self.answers.peers - self.stages


def choose(answers: Answers) -> Chosen | None:
    """The number of stages and the way of crossing that are at dense's loss soonest. None: nothing fits the peers, or
    the run would take longer than LONGEST (init_refuse.py says what would work)."""
    best = search(answers)
    if best is None:
        return None
    spec = _settled(best.spec, best.stages, answers.peers)
    cut = cut_for(spec, memory=answers.memory)
    predicted = forecast(cut, answers.link, answers.speed, memory=answers.memory)
    busy = predicted.wire_seconds / predicted.step_seconds
    saving = forecast_saving(cut, answers.link.bits_per_second, predicted.step_seconds, None, busy)
    return Chosen(answers, best.shape, best.stages, best.thrift, spec, cut, predicted, saving)


def search(answers: Answers) -> Found | None:
    """The best of all numbers of stages and all ways of crossing that fit and end within LONGEST. What saves memory at
    a price must be worth its while; single windows, which keep a device less busy than forecasts know, are for where
    nothing else does."""
    best: Found | None = None
    for thrift in THRIFT:
        if best is None or not thrift.one_window:
            below = math.inf if best is None else best.cost / WORTH_IT
            best = _best_with(answers, thrift, below) or best
    return best


@dataclass(frozen=True)
class _Tried:
    """A number of stages with a cut; `spec`: with a way of crossing as well."""

    stages: int
    shape: Shape
    cut: list[int]
    spec: RunSpec | None = None


def _best_with(answers: Answers, thrift: Thrift, below: float) -> Found | None:
    """The best that costs less than `below`. What costs least by its lower bound is looked into first, and nothing that
    costs more by that than the best is played through."""
    found: list[Found] = []
    order = count()
    waiting = [(least, next(order), tried) for least, tried in _shapes(answers, thrift, stage_counts(answers))]
    heapq.heapify(waiting)
    limit = below
    while waiting and waiting[0][0] < limit:
        _, _, one = heapq.heappop(waiting)
        if one.spec is None:
            for spec in _ways(answers, one, thrift):
                bound = _cost(spec, one.shape, least_seconds(spec, answers.link, answers.speed))
                heapq.heappush(waiting, (bound, next(order), replace(one, spec=spec)))
        elif (seconds := _seconds(answers, one.spec)) is not None:
            cost = _cost(one.spec, one.shape, seconds)
            found.append(Found(one.stages, one.shape, thrift, one.spec, seconds, cost))
            limit = min(limit, LEVEL * cost)
    good = [one for one in found if one.cost < limit]
    return min(good, key=lambda one: (assumed_loss(one.spec), one.stages, one.cost), default=None)


def _seconds(answers: Answers, spec: RunSpec) -> float | None:
    """Of a step; None: it does not fit, or the run takes too long."""
    if spec.steps * least_seconds(spec, answers.link, answers.speed) > LONGEST or _need(spec) > answers.memory:
        return None
    seconds = seconds_by_link(spec, answers.speed, answers.memory)(answers.link)
    return seconds if spec.steps * seconds <= LONGEST else None


def _ways(answers: Answers, one: _Tried, thrift: Thrift) -> list[RunSpec]:
    """To cross the boundaries of a cut, of those that may be chosen."""
    found = candidates(_draft(answers, one.shape, one.cut, thrift))
    return [spec for spec in found if answers.any_recipe or expected_loss(spec) is not None]


def _cost(spec: RunSpec, shape: Shape, step_seconds: float) -> float:
    """Shapes miss the size that was asked for by some per cent, and a smaller model is not a faster one."""
    tokens = spec.batch.size * spec.model.context
    return seconds_to_loss(step_seconds, assumed_loss(spec)) / tokens / shape.parameters


def stage_counts(answers: Answers) -> list[int]:
    """Numbers of stages to try: every one up to FEW, then in steps of a tenth, up to what a model of that size has
    layers for; for memory's sake also one for every peer."""
    most = min(answers.peers, shape_of(answers.parameters, 1, answers.vocabulary).layers)
    tried, n = {most, answers.peers} if answers.peers <= MOST_LAYERS else {most}, 1
    while n <= most:
        tried.add(n)
        n += max(1, n // 10 if n > FEW else 1)
    return sorted(tried)


def _shapes(answers: Answers, thrift: Thrift, counts: list[int]) -> list[tuple[float, _Tried]]:
    """Numbers of stages with a shape and a cut, by what each costs at least: the computing of its slowest stage. Other
    forms compute a little less than dense does, as a share NARROWER of it at least."""
    found: list[tuple[float, _Tried]] = []
    for stages in counts:
        usual = shape_of(answers.parameters, 1, answers.vocabulary)
        if usual.layers < stages:
            usual = shape_of(answers.parameters, stages, answers.vocabulary)
        spec = _draft(answers, usual, [usual.layers], thrift)
        dense = spec.model_copy(update={"subspace": spec.subspace.model_copy(update={"form": Dense.name})})
        flops = unit_flops(dense)
        head = flops["head"] / flops["layers.0"]
        for cut in _cuts(usual.layers, stages, head):
            shape = replace(usual, layers=sum(cut))
            if abs(shape.parameters / answers.parameters - 1) > OFF_SIZE and sum(cut) != usual.layers:
                continue
            slowest = max(max(cut), cut[-1] + head) * flops["layers.0"] / answers.speed
            found.append((NARROWER * slowest / shape.parameters, _Tried(stages, shape, cut)))
    return found


def _cuts(layers: int, stages: int, head: float) -> list[list[int]]:
    """Layers of each stage, for about so many: evenly, which may need the least memory; and with as many in all stages
    but the last, which has fewer, as the head takes as long to compute as `head` layers."""
    if stages == 1:
        return [[layers]]
    found = [_spread(layers, stages)]
    for each in {max(1, layers // stages), math.ceil(layers / stages), math.ceil(layers / stages) + 1}:
        found += [[each] * stages, [each] * (stages - 1) + [max(min(2, each), round(each - head))]]
    return [list(cut) for cut in dict.fromkeys(map(tuple, found))]


def _spread(layers: int, stages: int) -> list[int]:
    """Evenly; the first ones, which hold most microbatches, have one less where it does not come out even."""
    each, more = divmod(layers, stages)
    return [each] * (stages - more) + [each + 1] * more


def _draft(answers: Answers, shape: Shape, cut: list[int], thrift: Thrift) -> RunSpec:
    """A spec with a fixed cut and the default way to cross its boundaries."""
    windows = 1 if thrift.one_window else max(1, TOKENS_AT_ONCE // shape.context)
    wanted = max(FILLING * len(cut), shape.step_tokens // shape.context // windows)
    microbatches = 1 << max(0, math.ceil(math.log2(wanted)))
    batch = microbatches * windows
    steps = answers.steps or _round(TOKENS_EACH * answers.parameters / (batch * shape.context))
    tokens = {"kind": "none"} if answers.data["source"] == "bin" else {"kind": "bpe"}
    return spec_from(
        {
            "name": answers.name,
            "steps": steps,
            "stages": cut,
            "model": {
                "layers": shape.layers,
                "width": shape.width,
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "hidden": "auto",
                "context": shape.context,
            },
            "optimizer": {
                "name": "muon",
                "lr": _figures(min(1e-2, 4e-3 * 512 / shape.width)),
                "schedule": {"warmup_steps": min(max(1, steps // 20), 2000)},
                **thrift.optimizer,
            },
            "batch": {"size": batch, "microbatches": microbatches},
            "data": answers.data,
            "tokenizer": {**tokens, "vocab_size": shape.vocabulary},
            "eval": {"interval": max(1, min(1000, steps // 20))},
            "snapshots": {"keep": 2},
        }
    )


def _settled(spec: RunSpec, stages: int, peers: int) -> RunSpec:
    """The same with a cut that follows from the peers who join, unless that could make more stages than are good. What
    depends on the cut otherwise is written down."""
    data: dict[str, Any] = spec.model_dump(mode="json")
    layers = layers_per_stage(spec)
    even = len(set(layers)) == 1
    free = even if spec.has_segments else stages == peers
    data |= {"stages": "auto" if free else layers, "min_peers": stages}
    data["model"]["segments"] = (stages if even else layers) if spec.has_segments else None
    data["model"]["hidden"] = "auto"
    data["model"]["dense_hidden"] = None
    if not spec.form.has_basis:
        del data["subspace"]["k"]  # unused
    if spec.has_segments:
        data["groups"]["anchors"]["lr"] = _figures(3 * spec.optimizer.lr)
        data["groups"]["writers"]["std"] = 0.0
    return spec_from(data)


# What fits


def _need(spec: RunSpec) -> int:
    """Bytes of the largest stage."""
    cut, sizes = spans(layers_per_stage(spec)), StageMemory(spec)
    return max(
        sizes.total(span.start, span.stop, len(cut) - 1 - i) + sizes.on_host(span.start, span.stop)
        for i, span in enumerate(cut)
    )


def possible(answers: Answers) -> bool:
    """Whether `choose` would find something, from a few numbers of stages: what takes least memory is among them."""
    return any(_seconds(answers, spec) is not None for spec in _least(answers))


def least_need(answers: Answers) -> int:
    """Bytes of the largest stage, in the way that takes least."""
    return min(map(_need, _least(answers)))


def quickest(answers: Answers) -> float:
    """Seconds of the run at least, in the way that takes least, of those that fit."""
    return min(
        spec.steps * least_seconds(spec, answers.link, answers.speed)
        for spec in _least(answers)
        if _need(spec) <= answers.memory
    )


def _least(answers: Answers) -> Iterator[RunSpec]:
    for _, one in _few_shapes(answers):
        yield from _ways(answers, one, THRIFT[-1])


def _few_shapes(answers: Answers) -> list[tuple[float, _Tried]]:
    counts = stage_counts(answers)
    few = {counts[0], counts[len(counts) // 2], counts[3 * len(counts) // 4], *counts[-2:]}
    return sorted(_shapes(answers, THRIFT[-1], sorted(few, reverse=True)), key=lambda one: one[0])


def _figures(x: float) -> float:
    return float(f"{x:.1e}")


def _round(x: float) -> int:
    """To two figures, at least 20 steps."""
    return max(20, int(float(f"{x:.1e}")))
