"""A reference that plays several replicas of every stage: lanes that share a step's microbatches.

`SummedLanes` has one set of weights, as replicas that sum their gradients in every step have. `LocalLanes` has one for
each lane: they take steps of their own, and meet every so many.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from protomodels_cli.data.shards import TokenStream
from protomodels_cli.lab.recipes import Recipe
from protomodels_cli.lab.replica_sums import Gradients, Kind, Parameter, Sum, parse_sum
from protomodels_cli.lab.results import Result
from protomodels_cli.lab.scales import Scale
from protomodels_cli.lab.trained import Trained
from protomodels_cli.model.anchor import Touched
from protomodels_cli.model.moments import State
from protomodels_cli.model.optim import TrainedParameter
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.reference import Row
from protomodels_cli.protocol import steps
from protomodels_cli.spec.schema import RunSpec

OUTER_RATE, OUTER_MOMENTUM = 0.9, 0.6  # of local steps: the best of those that were tried before


class Lanes(Trained):
    def __init__(self, spec: RunSpec, scale: Scale, recipe: Recipe, device: str, lanes: int, way: str):
        super().__init__(spec, scale, recipe, device)
        self.lanes = lanes
        self.trained = [t for trainer in self.trainers for t in trainer.optimizer.parameters]
        self.sum: Sum = parse_sum(way, [_described(t) for t in self.trained], lanes, spec.seed)

    def run_share(self, step: int, lane: int) -> Tensor:
        """A lane's microbatches, which follow each other."""
        own = self.spec.batch.microbatches // self.lanes
        total = torch.zeros((), dtype=torch.float64, device=home_of_float64(self.device))
        for m in range(lane * own, (lane + 1) * own):
            total += self.run_microbatch(step, m)
        return total

    def facts(self) -> Result:
        """Bits: what a replica sends for a parameter in a step, by kind of parameter."""
        numbers = self.parameters * max(1, self.step)
        bits = {kind: found / numbers for kind, found in self.sum.bits().items()}
        return {"lanes": self.lanes, "sum_bits": sum(bits.values()), "sum_bits_by": bits, "sum": self.sum.facts()}


class SummedLanes(Lanes):
    def __init__(self, spec: RunSpec, scale: Scale, recipe: Recipe, device: str, lanes: int, way: str):
        super().__init__(spec, scale, recipe, device, lanes, way)
        if self.sum.has_own_momentum:
            for trained in self.trained:
                if trained.rule == "muon":
                    trained.settings = replace(trained.settings, momentum=0.0)

    def accumulate(self, step: int) -> float:
        for trainer in self.trainers:
            trainer.begin(step)
        total = torch.zeros((), dtype=torch.float64, device=home_of_float64(self.device))
        contributions = []
        for lane in range(self.lanes):
            total += self.run_share(step, lane)
            contributions.append(taken(self.trained))
        put(self.trained, self.sum(contributions, step))
        return float(total)

    def _decide(self, step: int, outcome: steps.Outcome) -> None:
        super()._decide(step, replace(outcome, apply=outcome.apply and not self.sum.is_late))
        self.sum.decide(outcome.apply)


@torch.no_grad()
def taken(parameters: list[TrainedParameter]) -> Gradients:
    """What was added up since the last time, which is gone then."""
    found = Gradients([], [])
    for trained in parameters:
        gradient, trained.parameter.grad = trained.parameter.grad, None
        rows = None
        if trained.anchor is not None:
            touched = trained.anchor.take()
            if touched is not None:
                gradient, rows = touched.rows(slice(None)), touched.place >= 0
        elif _is_table(trained) and gradient is not None:
            rows = (gradient != 0).any(1)
        found.tensors.append(gradient)
        found.touched.append(rows)
    return found


@torch.no_grad()
def put(parameters: list[TrainedParameter], total: Gradients) -> None:
    """As if one pipeline had added it up."""
    for trained, gradient, rows in zip(parameters, total.tensors, total.touched, strict=True):
        if gradient is None:
            continue
        gradient = gradient.to(trained.parameter.dtype)
        if trained.anchor is None:
            trained.parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        else:
            assert rows is not None
            touched = Touched(len(rows), 1, trained.parameter)
            touched.place = torch.where(rows, torch.arange(len(rows), device=rows.device), -1)
            touched.gradients = gradient.contiguous()
            trained.anchor.touched = touched


def _described(trained: TrainedParameter) -> Parameter:
    kind: Kind = "table" if _is_table(trained) else "matrix" if trained.rule == "muon" else "other"
    return Parameter(trained.name, tuple(trained.parameter.shape), kind, trained.settings.momentum)


def _is_table(trained: TrainedParameter) -> bool:
    return trained.anchor is not None or trained.name == "embed.weight"


@dataclass
class Lane:
    """All that a lane has for itself between two of its steps."""

    weights: list[Tensor]
    states: list[State]
    applied: list[int]


class LocalLanes(Lanes):
    """Every lane takes steps with its own gradients. Every `interval` steps the mean of the lanes' changes moves the
    common weights, with Nesterov's momentum (DiLoCo). Moments stay with their lane."""

    def __init__(self, spec: RunSpec, scale: Scale, recipe: Recipe, device: str, lanes: int, way: str, interval: int):
        super().__init__(spec, scale, recipe, device, lanes, way)
        self.interval = interval
        self.common = self._weights()
        self.momentum = [torch.zeros_like(w) for w in self.common]
        self.each = [Lane(self._weights(), [{} for _ in self.trained], [0] * len(self.trainers)) for _ in range(lanes)]

    def run_step(self) -> list[Row]:
        started, step = time.perf_counter(), self.step + 1
        outcomes = [self._run_lane(step, i) for i in range(self.lanes)]
        self.step = step
        if step % self.interval == 0 or step == self.spec.steps:
            self._meet(step)
        first = outcomes[0]
        return [
            {
                "event": "step",
                "step": step,
                "loss": fmean(outcome.loss for outcome in outcomes),
                "lr": first.lr,
                "grad_norm": fmean(outcome.norm for outcome in outcomes),
                "applied": all(outcome.apply for outcome in outcomes),
                "tokens": first.tokens,
                "seconds": time.perf_counter() - started,
                "basis_version": None,
            }
        ]

    @torch.no_grad()
    def _run_lane(self, step: int, index: int) -> steps.Outcome:
        lane = self.each[index]
        self._load(lane.weights)
        for trained, state in zip(self.trained, lane.states, strict=True):
            trained.state = state
        for trainer, applied in zip(self.trainers, lane.applied, strict=True):
            trainer.optimizer.applied = applied
            trainer.begin(step)
        with torch.enable_grad():
            loss = self.run_share(step, index)
        found = taken(self.trained)
        for gradient in found.tensors:
            if gradient is not None:
                gradient.mul_(self.lanes)  # divided by the whole step's tokens
        put(self.trained, found)
        outcome = steps.decide(self.spec, step, float(loss) * self.lanes, list(self.prepare().values()))
        self._decide(step, outcome)
        lane.weights = self._weights()
        lane.states = [trained.state for trained in self.trained]
        lane.applied = [trainer.optimizer.applied for trainer in self.trainers]
        return outcome

    @torch.no_grad()
    def _meet(self, step: int) -> None:
        changes = []
        for lane in self.each:
            moved = [w - common for w, common in zip(lane.weights, self.common, strict=True)]
            rows = [
                torch.ones(len(w), dtype=torch.bool, device=w.device) if _is_table(t) else None
                for w, t in zip(moved, self.trained, strict=True)
            ]
            changes.append(Gradients(list(moved), list(rows)))
        total = self.sum(changes, step)
        self.sum.decide(True)
        for common, momentum, change in zip(self.common, self.momentum, total.tensors, strict=True):
            assert change is not None
            mean = change / self.lanes
            momentum.mul_(OUTER_MOMENTUM).add_(mean)
            common.add_(mean + OUTER_MOMENTUM * momentum, alpha=OUTER_RATE)
        for lane in self.each:
            lane.weights = [w.clone() for w in self.common]

    def evaluate(self, codecs: bool = True, held_out: TokenStream | None = None) -> float:
        """Of the mean of all lanes, which are equal where they have just met."""
        self._load([torch.stack(own).mean(0) for own in zip(*(lane.weights for lane in self.each), strict=True)])
        return super().evaluate(codecs, held_out)

    def _weights(self) -> list[Tensor]:
        return [trained.parameter.detach().clone() for trained in self.trained]

    @torch.no_grad()
    def _load(self, weights: list[Tensor]) -> None:
        for trained, own in zip(self.trained, weights, strict=True):
            trained.parameter.copy_(own)
        for stage in self.stages:
            stage.refresh()
