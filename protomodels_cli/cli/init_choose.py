"""From what an owner says of a model and its peers to a spec, through the planner. Pure: no files, no torch.

It must not know how the spec is written down, nor how the answers were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from protomodels_cli.cli.init_shape import Shape, shape_of
from protomodels_cli.cli.run_plan import candidates, cut_for
from protomodels_cli.cost.forecast import (
    SLACK,
    Choice,
    Estimate,
    Forecast,
    estimate,
    forecast,
    line_seconds,
    recommended,
)
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.saving import Saving, forecast_saving
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.errors import OptionError
from protomodels_cli.quantities import count, plural, size
from protomodels_cli.spec.cut import layers_per_stage, spans
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import LinkSpec, RunSpec

TOKENS_EACH = 20  # of training for a parameter: about where more parameters and more tokens are worth the same
FILLING = 4  # microbatches for each stage: the pipeline stands still for less than a fifth of a step
TOKENS_AT_ONCE = 2048  # in a microbatch
MOST_PEERS = 256  # that a refusal suggests
HOPELESS = 2.0  # forms differ in computing by less than that


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
class Chosen:
    answers: Answers
    shape: Shape
    stages: int
    thrift: Thrift
    spec: RunSpec  # as it will be written
    cut: RunSpec  # the same, cut for these peers
    keeps_up: bool  # the link does not hold it up
    forecast: Forecast
    saving: Saving
    alone: Estimate | None  # one such peer with the whole model, where it fits


def choose(answers: Answers) -> Chosen:
    """The fastest number of stages, and for it the least compression with which the link does not hold it up. Raises
    OptionError where nothing fits the peers."""
    best: tuple[int, Shape, Thrift, Choice] | None = None
    for thrift in THRIFT:
        for stages in _stage_counts(answers):
            shape = shape_of(answers.parameters, stages, answers.vocabulary)
            draft = _draft(answers, shape, stages, thrift)
            quickest = answers.speed * stages / sum(unit_flops(draft).values())
            if best is not None and quickest <= SLACK * best[3].forecast.tokens_per_s:
                continue
            found = _way(answers, draft)
            if found is None:
                continue
            if best is None or found.forecast.tokens_per_s > SLACK * best[3].forecast.tokens_per_s:
                best = stages, shape, thrift, found
            if found.keeps_up:
                break  # with fewer stages each has more to compute
        if best is not None:
            break
    if best is None:
        raise _does_not_fit(answers)
    stages, shape, thrift, way = best
    spec = _settled(way.spec, stages)
    cut = cut_for(spec, memory=answers.memory)
    predicted = forecast(cut, answers.link, answers.speed, memory=answers.memory)
    busy = predicted.wire_seconds / predicted.step_seconds
    saving = forecast_saving(cut, answers.link.bits_per_second, predicted.step_seconds, None, busy)
    return Chosen(
        answers, shape, stages, thrift, spec, cut, way.keeps_up, predicted, saving, _alone(answers, shape, thrift)
    )


def _stage_counts(answers: Answers) -> list[int]:
    """Numbers of stages to try, the most first: up to what a model of that size has layers for; for memory's sake, so
    many that every peer holds one."""
    natural = shape_of(answers.parameters, 1, answers.vocabulary).layers
    most = min(answers.peers, natural)
    tried = {n for n in (2, most // 4, most // 2, most) if 2 <= n <= most} or {1}
    if answers.peers > natural and not _fits(answers, most):
        tried.add(answers.peers)
    return sorted(tried, reverse=True)


def _draft(answers: Answers, shape: Shape, stages: int, thrift: Thrift) -> RunSpec:
    """A spec with a fixed cut, whose way to cross the boundaries is still to be chosen."""
    windows = 1 if thrift.one_window else max(1, TOKENS_AT_ONCE // shape.context)
    wanted = max(FILLING * stages, shape.step_tokens // shape.context // windows)
    microbatches = 1 << max(0, math.ceil(math.log2(wanted)))
    batch = microbatches * windows
    steps = answers.steps or _round(TOKENS_EACH * answers.parameters / (batch * shape.context))
    tokens = {"kind": "none"} if answers.data["source"] == "bin" else {"kind": "bpe"}
    return spec_from(
        {
            "name": answers.name,
            "steps": steps,
            "stages": stages,
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


def _way(answers: Answers, draft: RunSpec) -> Choice | None:
    """As `recommended` would choose among all; None: none fits the peers' memory. What the busiest connection alone
    makes slower than the most compressed way by HOPELESS is not played through."""
    fitting = [spec for spec in candidates(draft) if _need(spec) <= answers.memory]
    if not fitting:
        return None
    *others, narrowest = fitting
    last = _played(answers, narrowest)
    found = []
    for spec in others:
        if line_seconds(spec, answers.link) <= HOPELESS * last.forecast.step_seconds:
            found.append(choice := _played(answers, spec))
            if choice.keeps_up:
                return choice
    return recommended([*found, last])


def _played(answers: Answers, spec: RunSpec) -> Choice:
    return Choice(spec, estimate(spec, answers.link, answers.speed, memory=answers.memory), answers.memory)


def _settled(spec: RunSpec, stages: int) -> RunSpec:
    """The same with a cut that follows from the peers who join. What depends on the cut otherwise is written down."""
    data: dict[str, Any] = spec.model_dump(mode="json")
    data |= {"stages": "auto", "min_peers": stages}
    data["model"]["segments"] = stages if spec.has_segments else None
    data["model"]["hidden"] = "auto"
    data["model"]["dense_hidden"] = None
    if not spec.form.has_basis:
        del data["subspace"]["k"]  # unused
    if spec.has_segments:
        data["groups"]["anchors"]["lr"] = _figures(3 * spec.optimizer.lr)
        data["groups"]["writers"]["std"] = 0.0
    return spec_from(data)


def _alone(answers: Answers, shape: Shape, thrift: Thrift) -> Estimate | None:
    if answers.peers == 1:
        return None
    spec = next(iter(candidates(_draft(answers, shape, 1, thrift))))
    return estimate(spec, answers.link, answers.speed, memory=answers.memory) if _need(spec) <= answers.memory else None


# What fits


def _need(spec: RunSpec) -> int:
    """Bytes of the largest stage."""
    cut, sizes = spans(layers_per_stage(spec)), StageMemory(spec)
    return max(
        sizes.total(span.start, span.stop, len(cut) - 1 - i) + sizes.on_host(span.start, span.stop)
        for i, span in enumerate(cut)
    )


def _least_need(answers: Answers, stages: int) -> int:
    """In whatever way takes least."""
    shape = shape_of(answers.parameters, stages, answers.vocabulary)
    return min(_need(spec) for spec in candidates(_draft(answers, shape, stages, THRIFT[-1])))


def _fits(answers: Answers, stages: int) -> bool:
    return _least_need(answers, stages) <= answers.memory


def _does_not_fit(answers: Answers) -> OptionError:
    most = max(_stage_counts(answers))
    need = min(_least_need(answers, stages) for stages in _stage_counts(answers))
    gib = math.ceil(need / 2**30 * 10) / 10
    ways = [f"--memory {gib:g} ({size(need)} on every peer)"]
    if (more := next((n for n in _more(answers.peers) if _fits(answers, n)), None)) is not None:
        ways.insert(0, f"--peers {more} with this memory")
    if (
        smaller := next(
            (
                n
                for n in _smaller(answers.parameters)
                if _fits(replace(answers, parameters=n), min(answers.peers, shape_of(n, 1, answers.vocabulary).layers))
            ),
            None,
        )
    ) is not None:
        ways.append(f"--size {count(smaller).replace(' ', '')} on these peers")
    return OptionError(
        f"a model of {count(answers.parameters)} parameters does not fit {plural(answers.peers, 'peer')} with "
        f"{size(answers.memory)} each: cut into {plural(most, 'stage')}, the largest needs {size(need)}",
        f"one of {', '.join(ways)}",
        "does_not_fit",
    )


def _more(peers: int) -> Iterator[int]:
    n = peers + 1
    while n <= MOST_PEERS:
        yield n
        n += max(1, n // 8)


def _smaller(parameters: float) -> Iterator[float]:
    n = parameters
    while n > 2e5:
        n *= 0.8
        yield float(f"{n:.1e}")


def _figures(x: float) -> float:
    return float(f"{x:.1e}")


def _round(x: float) -> int:
    """To two figures, at least 20 steps."""
    return max(20, int(float(f"{x:.1e}")))
