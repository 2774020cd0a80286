"""The constrained form: full matrices whose written rows are kept in S by the optimizer.

The state is x; a message is (x − T_fixed[tok])·U. Matrices are handled in coordinates throughout: the gradient that
counts is g·U, moments have k columns, and an update is a direction times Uᵀ. So no rule can push them out of S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protomodels_cli.forms.base import Role, Rule, Sizes, Switch
from protomodels_cli.forms.subspace import SubspaceForm

if TYPE_CHECKING:
    from torch import Tensor


class Constrained(SubspaceForm):
    name = "constrained"
    about = "trains full matrices kept in S"

    @classmethod
    def optimizer_columns(cls, sizes: Sizes, stored: int) -> int:
        return sizes.k

    @classmethod
    def lifted_columns(cls, sizes: Sizes) -> int:
        return sizes.width

    @classmethod
    def optimizer_problem(cls, optimizer: str) -> tuple[str, str] | None:
        if optimizer == "adamw":
            return (
                "AdamW scales every entry separately, which moves constrained matrices out of the subspace S",
                "use row_adamw or muon, or set subspace.form to reparam, where every optimizer stays in S",
            )
        return None

    @classmethod
    def anchor_problem(cls) -> tuple[str, str] | None:
        return (
            "the constrained form carries T_fixed from stage to stage in its state, and a stage with its own anchor "
            "would not take away what others have added",
            "set subspace.anchor to fixed, or subspace.form to reparam",
        )

    @classmethod
    def rule_for(cls, optimizer: str, role: Role) -> Rule:
        if optimizer == "muon" and role == "writer":
            return "muon"
        if optimizer == "adamw":
            raise ValueError("AdamW would move a constrained matrix out of S: use row_adamw or muon")
        return "row_adamw"

    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return rows + anchor

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return (state - anchor) @ self.u

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return message @ self.u.T + anchor

    def initial(self, draw: Callable[[int], Tensor], columns: int) -> Tensor:
        """Drawn as coordinates: in S from the start, and the same function as its reparametrised twin."""
        return draw(self.u.shape[1]).to(self.u) @ self.u.T

    def project(self, gradient: Tensor) -> Tensor:
        return gradient @ self.u

    def lift(self, direction: Tensor) -> Tensor:
        return direction @ self.u.T

    def reproject(self, weight: Tensor) -> None:
        weight.copy_((weight @ self.u) @ self.u.T)

    def follow(self, weight: Tensor, switch: Switch) -> None:
        """transport: coordinates stay. project: W·U′."""
        coordinates = weight @ (switch.old if switch.move == "transport" else switch.new)
        weight.copy_(coordinates @ switch.new.T)
