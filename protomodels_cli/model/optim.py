"""A stage's optimizer: which rule moves which parameter, gradients after projection, and the basis switch.

What a matrix that writes to the stream needs beyond its rule, its form says: how its gradient is projected, an update
lifted, and how weights and moments follow U.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.forms import Dense, Form, Move, Role, Rule, Switch
from protomodels_cli.model import moments, rules
from protomodels_cli.model.anchor import Anchor, Taps, Touched
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer, is_early, is_in_head
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.stage import Stage
from protomodels_cli.spec.groups import Settings, settings
from protomodels_cli.spec.optimizer import STEP_NUMBERS, TOGETHER_NUMBERS
from protomodels_cli.spec.schema import RunSpec

ROW = 4096  # numbers that are summed in float32


@dataclass
class TrainedParameter:
    """One parameter, its rule and its optimizer state."""

    name: str
    parameter: torch.nn.Parameter
    rule: Rule
    settings: Settings
    form: Form  # of a matrix that writes to the stream; dense for all others
    kept_as: torch.dtype  # its moments; a step computes in the parameter's own type
    anchor: Anchor | None = None  # whose table it is
    state: moments.State = field(default_factory=dict)
    gradient: Tensor | None = None  # this step's, after projection; set by prepare()
    touched: Touched | None = None  # where each row of an anchor has its own in the gradient, if it has one

    @property
    def is_fused(self) -> bool:
        """Whether one kernel does the whole step."""
        return self.rule == "adamw" and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be done to an update or to moments between computing and keeping them."""
        return self.kept_as == self.parameter.dtype and type(self.form).lift is Form.lift

    def take_gradient(self) -> Tensor:
        """What has been accumulated, after projection."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if self.anchor is not None:
            self.touched = self.anchor.take()
            gradient = None if self.touched is None else self.touched.gradients
        if gradient is None and is_early(self.name):  # its loss no longer counts
            gradient = torch.zeros_like(self.parameter)
        if gradient is None:
            raise RuntimeError(f"{self.name} got no gradient")
        self.gradient = self.form.project(gradient)
        return self.gradient

    def forget_gradient(self) -> None:
        self.gradient = self.touched = self.parameter.grad = None
        if self.anchor is not None:
            self.anchor.take()

    def own(self) -> tuple[torch.nn.Parameter, Tensor, moments.State]:
        assert self.gradient is not None
        if not self.state:
            self.state = moments.new_state(self.rule, self.parameter, self.kept_as, self.gradient.shape[-1])
            if self.settings.beta1 == 0 and self.rule == "row_adamw":
                del self.state["first"]
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

    def __init__(self, stage: Stage, spec: RunSpec):
        self.stage, self.seed = stage, spec.seed
        self.applied = 0
        self.parameters = _parameters(stage, spec)
        self.batched = stage.device.type == "cuda"  # small matrices of one shape are moved together

    @torch.no_grad()
    def prepare(self) -> dict[str, float]:
        """Take over the accumulated gradients. Returns the squared norm of each unit, in layer order."""
        found = [_norm(trained.take_gradient()) for trained in self.parameters]
        norms: dict[str, float] = {}
        for trained, norm in zip(self.parameters, _numbers(found), strict=True):
            norms[trained.unit] = norms.get(trained.unit, 0.0) + norm**2
        return norms

    @torch.no_grad()
    def apply(self, lr: float, coefficient: float) -> None:
        """Take the step with gradients × coefficient. Raises RuntimeError where they were not prepared, and changes
        nothing then."""
        if any(trained.gradient is None for trained in self.parameters):
            raise RuntimeError("apply() follows prepare()")
        self.applied += 1
        fused: dict[tuple[torch.device, Settings], list[TrainedParameter]] = {}
        for trained in self.parameters:
            if trained.is_fused:
                fused.setdefault((trained.parameter.device, trained.settings), []).append(trained)
        for (_, group), members in fused.items():
            rules.fused_adamw([t.own() for t in members], self.applied, group, lr * group.rate, coefficient)
            for trained in members:
                trained.gradient = None
        together = self._batches() if self.batched else []
        for batch in together:
            self._step_together(batch, lr * batch[0].settings.rate, coefficient)
        moved = {id(trained) for batch in together for trained in batch}
        for trained in self.parameters:
            if not trained.is_fused and id(trained) not in moved:
                for rows in trained.pieces():
                    self._step(trained, rows, lr * trained.settings.rate, coefficient)
                trained.gradient = trained.touched = None
        self.stage.refresh()

    def _step(self, trained: TrainedParameter, rows: slice, lr: float, coefficient: float) -> None:
        parameter, gradient, state = trained.own()
        own, kept = parameter[rows], {key: t[rows] for key, t in state.items()}
        wide = {key: t.to(gradient.dtype) for key, t in kept.items()}  # copies only of narrow ones
        g = gradient[rows] if trained.touched is None else trained.touched.rows(rows)
        g.mul_(coefficient)
        direction = self._direction(trained, g, wide)
        if trained.settings.weight_decay:
            own.mul_(1 - lr * trained.settings.weight_decay)
        own.add_(trained.form.lift(direction), alpha=-lr)
        del direction  # before more memory is taken
        for key, t in kept.items():
            self._keep(trained, key, wide[key], t, rows.start)

    def _batches(self) -> list[list[TrainedParameter]]:
        """Matrices that Muon moves as they are, by shape and settings, several in a batch while they are small."""
        alike: dict[tuple[Any, ...], list[TrainedParameter]] = {}
        for trained in self.parameters:
            if trained.rule == "muon" and trained.is_plain:
                key = (trained.parameter.device, trained.parameter.shape, trained.settings)
                alike.setdefault(key, []).append(trained)
        found = []
        for members in alike.values():
            most = max(1, TOGETHER_NUMBERS // members[0].parameter.numel())
            found += [members[i : i + most] for i in range(0, len(members), most)]
        return [batch for batch in found if len(batch) > 1]

    def _step_together(self, batch: list[TrainedParameter], lr: float, coefficient: float) -> None:
        parameters, gradients, states = zip(*(trained.own() for trained in batch), strict=True)
        torch._foreach_mul_(gradients, coefficient)
        directions = rules.muon_batch(list(gradients), list(states), batch[0].settings)
        if decay := batch[0].settings.weight_decay:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        torch._foreach_add_(parameters, directions, alpha=-lr)
        for trained in batch:
            trained.gradient = None

    def _keep(self, trained: TrainedParameter, key: str, wide: Tensor, kept: Tensor, row: int, when: str = "") -> None:
        """Write a moment's rows, from `row` on, where they are kept in another type than they were computed in."""
        if kept.dtype != wide.dtype:
            seed = counter.subseed(self.seed, "moments", trained.name, key, self.applied, when)
            moments.round_stochastically(wide, kept, seed, row * kept.shape[1])

    def discard(self) -> None:
        """Skip the step: gradients are dropped, nothing else changes."""
        for trained in self.parameters:
            trained.forget_gradient()

    def _direction(self, trained: TrainedParameter, g: Tensor, state: moments.State) -> Tensor:
        match trained.rule:
            case "muon":
                return rules.muon(g, state, trained.settings)
            case "row_adamw":
                return rules.row_adamw(g, state, self.applied, trained.settings, trained.parameter.shape[1])
            case "adamw":
                return rules.adamw(g, state, self.applied, trained.settings)

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
            if not trained.form.has_basis:
                continue
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


def _parameters(stage: Stage, spec: RunSpec) -> list[TrainedParameter]:
    found = []
    for name, module in stage.named_modules():
        role: Role
        form: Form = Dense()
        anchor: Anchor | None = None
        match module:
            case Writer():
                role, form = "embedding" if name == "embed" else "writer", module.form
            case Matrix():
                role = "head" if is_in_head(name) else "matrix"
            case RMSNorm() | Taps():
                role = "gain"
            case Anchor():
                role, anchor = "anchor", module
            case _:
                continue
        weight, kept_as = module.weight, _kept_as(role, module.weight.dtype, spec)
        rule = form.chosen_rule(spec.optimizer, role)
        found.append(TrainedParameter(f"{name}.weight", weight, rule, settings(spec, role), form, kept_as, anchor))
    return found


def _kept_as(role: Role, stored: torch.dtype, spec: RunSpec) -> torch.dtype:
    """What the moments of a parameter are kept in. Of gains there are too few, and of anchors too many, to choose."""
    if role == "gain" or stored == torch.float64:
        return stored
    chosen = {"float32": stored, "bf16": torch.bfloat16}[spec.optimizer.moments]
    return torch.bfloat16 if role == "anchor" else chosen
