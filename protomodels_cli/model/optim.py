"""A stage's optimizer: which rule moves which parameter, gradients after projection, and the basis switch.

What a matrix that writes to the stream needs beyond its rule, its form says: how its gradient is projected, an update
lifted, and how weights and moments follow U.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.forms import Dense, Form, Move, Role, Rule, Switch
from protomodels_cli.model import moments, rules
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.stage import Stage
from protomodels_cli.spec.optimizer import STEP_NUMBERS, OptimizerSpec

ROW = 4096  # numbers that are summed in float32


@dataclass
class TrainedParameter:
    """One parameter, its rule and its optimizer state."""

    name: str
    parameter: torch.nn.Parameter
    rule: Rule
    decays: bool
    form: Form  # of a matrix that writes to the stream; dense for all others
    kept_as: torch.dtype  # its moments; a step computes in the parameter's own type
    state: moments.State = field(default_factory=dict)
    gradient: Tensor | None = None  # this step's, after projection; set by prepare()

    @property
    def is_fused(self) -> bool:
        """Whether one kernel does the whole step: nothing is to be done to the update in between."""
        whole = self.kept_as == self.parameter.dtype and type(self.form).lift is Form.lift
        return self.rule == "adamw" and whole

    def own(self) -> tuple[torch.nn.Parameter, Tensor, moments.State]:
        assert self.gradient is not None, "apply() follows prepare()"
        if not self.state:
            self.state = moments.new_state(self.rule, self.gradient, self.kept_as)
        return self.parameter, self.gradient, self.state

    def pieces(self) -> Iterator[slice]:
        """Rows that are stepped at one time: a table may be too large to have several tensors of its size."""
        rows, columns = len(self.parameter), self.parameter[0].numel()
        most = rows if self.rule == "muon" else max(1, STEP_NUMBERS // columns)
        return (slice(start, min(start + most, rows)) for start in range(0, rows, most))

    @property
    def unit(self) -> str:
        """`embed`, `layers.N` or `head`: what a squared norm is reported for."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


class StageOptimizer:
    """Prepare (project, measure), then apply or discard: the two halves of a step's commit."""

    def __init__(self, stage: Stage, spec: OptimizerSpec, seed: int):
        """`seed`: the run's."""
        self.stage, self.spec, self.seed = stage, spec, seed
        self.applied = 0
        self.parameters = _parameters(stage, spec)

    @torch.no_grad()
    def prepare(self) -> dict[str, float]:
        """Take over the accumulated gradients. Returns the squared norm of each unit, in layer order."""
        found = []
        for trained in self.parameters:
            gradient = trained.parameter.grad
            assert gradient is not None, f"{trained.name} got no gradient"
            trained.gradient = trained.form.project(gradient)
            trained.parameter.grad = None
            found.append(_norm(trained.gradient))
        norms: dict[str, float] = {}
        for trained, norm in zip(self.parameters, _numbers(found), strict=True):
            norms[trained.unit] = norms.get(trained.unit, 0.0) + norm**2
        return norms

    @torch.no_grad()
    def apply(self, lr: float, coefficient: float) -> None:
        """Take the step with gradients × coefficient."""
        self.applied += 1
        fused = [trained for trained in self.parameters if trained.is_fused]
        for device, decays in product(self.stage.devices, (True, False)):
            group = [t for t in fused if (t.parameter.device, t.decays) == (device, decays)]
            weight_decay = self.spec.weight_decay if decays else 0.0
            rules.fused_adamw([t.own() for t in group], self.applied, self.spec, lr, coefficient, weight_decay)
            for trained in group:
                trained.gradient = None
        for trained in self.parameters:
            if not trained.is_fused:
                for rows in trained.pieces():
                    self._step(trained, rows, lr, coefficient)
                trained.gradient = None
        self.stage.refresh()

    def _step(self, trained: TrainedParameter, rows: slice, lr: float, coefficient: float) -> None:
        parameter, gradient, state = trained.own()
        wide = {key: kept[rows].to(gradient.dtype) for key, kept in state.items()}  # copies only of narrow ones
        direction = self._direction(trained, gradient[rows].mul_(coefficient), wide)
        weight = parameter[rows]
        if trained.decays and self.spec.weight_decay:
            weight.mul_(1 - lr * self.spec.weight_decay)
        weight.add_(trained.form.lift(direction), alpha=-lr)
        del direction  # before more memory is taken
        for key, kept in state.items():
            self._keep(trained, key, wide[key], kept[rows], rows.start)

    def _keep(self, trained: TrainedParameter, key: str, wide: Tensor, kept: Tensor, row: int, when: str = "") -> None:
        """Write a moment's rows, from `row` on, where they are kept in another type than they were computed in."""
        if kept.dtype != wide.dtype:
            seed = counter.subseed(self.seed, "moments", trained.name, key, self.applied, when)
            moments.round_stochastically(wide, kept, seed, row * kept.shape[1])

    def discard(self) -> None:
        """Skip the step: gradients are dropped, nothing else changes."""
        for trained in self.parameters:
            trained.gradient = trained.parameter.grad = None

    def _direction(self, trained: TrainedParameter, g: Tensor, state: moments.State) -> Tensor:
        match trained.rule:
            case "muon":
                return rules.muon(g, state, self.spec)
            case "row_adamw":
                return rules.row_adamw(g, state, self.applied, self.spec, trained.parameter.shape[1])
            case "adamw":
                return rules.adamw(g, state, self.applied, self.spec)

    @torch.no_grad()
    def switch_basis(self, new: Basis, move: Move) -> None:
        """Move weights and moments from the stage's basis to `new`, and the stage with them."""
        forms = [section.form for section in self.stage.sections]
        moved = [new.copy_to(section.device) for section in self.stage.sections]
        switches = {
            there.u.device: Switch(form.u, there.u, form.u.T @ there.u, move)
            for form, there in zip(forms, moved, strict=True)
        }
        for trained in self.parameters:
            switch = switches[trained.parameter.device]
            trained.form.follow(trained.parameter, switch)
            wide = {key: kept.to(trained.parameter.dtype) for key, kept in trained.state.items()}
            trained.form.follow_moments(wide, trained.rule, switch)
            for key, kept in trained.state.items():
                self._keep(trained, key, wide[key], kept, 0, "switch")
            trained.state |= {key: t for key, t in wide.items() if trained.state[key].dtype == t.dtype}
        for form, there in zip(forms, moved, strict=True):
            form.basis = there
        self.stage.refresh()

    @torch.no_grad()
    def reproject(self) -> None:
        """Put constrained weights back into S, against the rounding of many steps."""
        for trained in self.parameters:
            trained.form.reproject(trained.parameter)
        self.stage.refresh()


def _numbers(scalars: list[Tensor]) -> list[float]:
    """In one transfer from each device."""
    found: dict[int, float] = {}
    for device in {scalar.device for scalar in scalars}:
        here = [i for i, scalar in enumerate(scalars) if scalar.device == device]
        found |= zip(here, torch.stack([scalars[i] for i in here]).tolist(), strict=True)
    return [found[i] for i in range(len(scalars))]


def _norm(gradient: Tensor) -> Tensor:
    """In float64. On a GPU, where that would make a copy twice as large, rows of 4096 numbers are summed in the
    gradient's own type first."""
    if gradient.is_cuda:
        flat = gradient.flatten()
        whole = len(flat) // ROW * ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
        gradient = torch.cat((rows, flat[whole:]))
    return torch.linalg.vector_norm(gradient.to(home_of_float64(gradient.device)), dtype=torch.float64)


def _parameters(stage: Stage, spec: OptimizerSpec) -> list[TrainedParameter]:
    found = []
    for name, module in stage.named_modules():
        role: Role
        form: Form = Dense()
        match module:
            case Writer():
                role, form = "embedding" if name == "embed" else "writer", module.form
            case Matrix():
                role = "head" if name.startswith("head.") else "matrix"
            case RMSNorm():
                role = "gain"
            case _:
                continue
        is_matrix, weight = role != "gain", module.weight
        kept_as = {"float32": weight.dtype, "bf16": torch.bfloat16}[spec.moments] if is_matrix else weight.dtype
        rule = form.chosen_rule(spec, role)
        found.append(TrainedParameter(f"{name}.weight", weight, rule, is_matrix, form, kept_as))
    return found
