"""A stage's optimizer: which rule moves which parameter, gradients after projection, and the basis switch.

Constrained matrices are handled in coordinates throughout: the gradient that counts is g·U (its projection on S),
moments have k columns, and an update is a direction times Uᵀ. So no rule can push them out of S, and the state
is that of the reparametrised form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from protomodels_cli.model import rules
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.forms import Constrained, Dense, Reparam
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.stage import Stage
from protomodels_cli.spec.schema import OptimizerSpec

Rule = Literal["adamw", "row_adamw", "muon"]
Role = Literal["gain", "matrix", "writer", "embedding", "head"]


def rule_for(optimizer: str, role: Role, constrained: bool) -> Rule:
    """The one table of what moves what."""
    if optimizer == "muon" and role in ("matrix", "writer"):
        return "muon"
    if not constrained:
        return "adamw"
    if optimizer == "adamw":
        raise ValueError("AdamW would move a constrained matrix out of S: use row_adamw or muon")
    return "row_adamw"


@dataclass
class Slot:
    """One parameter, its rule and its optimizer state."""

    name: str
    parameter: torch.nn.Parameter
    rule: Rule
    decays: bool
    form: Constrained | Reparam | None  # for matrices tied to the basis
    state: rules.State = field(default_factory=dict)
    gradient: Tensor | None = None  # this step's, after projection; set by prepare()

    @property
    def constrained(self) -> bool:
        return isinstance(self.form, Constrained)

    @property
    def unit(self) -> str:
        """`embed`, `layers.N` or `head`: what a squared norm is reported for."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


class StageOptimizer:
    """Prepare (project, measure), then apply or discard: the two halves of a step's commit."""

    def __init__(self, stage: Stage, spec: OptimizerSpec):
        self.stage, self.spec = stage, spec
        self.applied = 0
        self.slots = _slots(stage, spec.name)

    @torch.no_grad()
    def prepare(self) -> dict[str, float]:
        """Take over the accumulated gradients. Returns the squared norm of each unit, in layer order."""
        norms: dict[str, float] = {}
        for slot in self.slots:
            gradient = slot.parameter.grad
            assert gradient is not None, f"{slot.name} got no gradient"
            slot.gradient = gradient @ slot.form.basis.u if isinstance(slot.form, Constrained) else gradient
            slot.parameter.grad = None
            squared = _squared_norm(slot.gradient)
            norms[slot.unit] = norms.get(slot.unit, 0.0) + squared
        return norms

    @torch.no_grad()
    def apply(self, lr: float, coefficient: float) -> None:
        """Take the step with gradients × coefficient."""
        self.applied += 1
        for slot in self.slots:
            assert slot.gradient is not None, "apply() follows prepare()"
            direction = self._direction(slot, slot.gradient * coefficient)
            if slot.decays and self.spec.weight_decay:
                slot.parameter.mul_(1 - lr * self.spec.weight_decay)
            if isinstance(slot.form, Constrained):
                direction = direction @ slot.form.basis.u.T
            slot.parameter.add_(direction, alpha=-lr)
            slot.gradient = None

    def discard(self) -> None:
        """Skip the step: gradients are dropped, nothing else changes."""
        for slot in self.slots:
            slot.gradient = slot.parameter.grad = None

    def _direction(self, slot: Slot, g: Tensor) -> Tensor:
        match slot.rule:
            case "muon":
                return rules.muon(g, slot.state, self.spec)
            case "row_adamw":
                return rules.row_adamw(g, slot.state, self.applied, self.spec, slot.parameter.shape[1])
            case "adamw":
                return rules.adamw(g, slot.state, self.applied, self.spec)

    @torch.no_grad()
    def switch_basis(self, new: Basis, move: Literal["transport", "project"]) -> None:
        """Move weights and moments from the stage's basis to `new`, and the stage with them.

        transport: coordinates stay. project: coordinates of what lies in the new span, W·U′ = (W·U)·(UᵀU′).
        """
        old = self.stage.basis
        assert old is not None
        new = new.copy_to(self.stage.device)
        turn = old.u.T @ new.u  # M, k×k
        for slot in self.slots:
            if slot.form is None:
                continue
            if isinstance(slot.form, Constrained):
                coordinates = slot.parameter @ (old.u if move == "transport" else new.u)
                slot.parameter.copy_(coordinates @ new.u.T)
            elif move == "project":
                slot.parameter.copy_(slot.parameter @ turn)
            if move == "project" and slot.state:
                slot.state["first"] = slot.state["first"] @ turn
                if slot.rule == "adamw":  # element-wise second moments; row moments do not depend on U
                    slot.state["second"] = slot.state["second"] @ turn.square()
        self.stage.form.basis = new  # type: ignore[attr-defined]

    @torch.no_grad()
    def reproject(self) -> None:
        """Put constrained weights back into S, against the rounding of many steps."""
        for slot in self.slots:
            if isinstance(slot.form, Constrained):
                u = slot.form.basis.u
                slot.parameter.copy_((slot.parameter @ u) @ u.T)


def _squared_norm(gradient: Tensor) -> float:
    gradient = gradient.to(home_of_float64(gradient.device))
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2


def _slots(stage: Stage, optimizer: str) -> list[Slot]:
    found = []
    for name, module in stage.named_modules():
        role: Role
        match module:
            case Writer():
                role = "embedding" if name == "embed" else "writer"
            case Matrix():
                role = "head" if name.startswith("head.") else "matrix"
            case RMSNorm():
                role = "gain"
            case _:
                continue
        tied = module.form if isinstance(module, Writer) and not isinstance(module.form, Dense) else None
        assert tied is None or isinstance(tied, Constrained | Reparam)
        rule = rule_for(optimizer, role, isinstance(tied, Constrained))
        found.append(Slot(f"{name}.weight", module.weight, rule, role != "gain", tied))
    return found
