"""What forms with a subspace share: k numbers a token over a boundary, free last layers, moments as coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomodels_cli.forms.base import START_DENSE, Form, Rule, Sizes, Switch

if TYPE_CHECKING:
    from torch import Tensor


class SubspaceForm(Form):
    has_basis = True

    @classmethod
    def boundary_width(cls, sizes: Sizes) -> int:
        return sizes.k

    @classmethod
    def free_layers(cls, sizes: Sizes) -> int:
        return sizes.unconstrained_layers

    @classmethod
    def least_last_layers(cls, sizes: Sizes) -> int:
        return max(1, sizes.unconstrained_layers)

    @classmethod
    def init_problem(cls) -> tuple[str, str] | None:
        return (
            "what the blocks of an ordinary transformer write does not lie in a subspace S of k dimensions, as the "
            f"{cls.name} form needs it",
            START_DENSE,
        )

    def follow_moments(self, state: dict[str, Tensor], rule: Rule, switch: Switch) -> None:
        """transport: coordinates stay. project: those of what lies in the new span."""
        if switch.move == "project":
            if "first" in state:
                state["first"] = state["first"] @ switch.turn
            if rule == "adamw" and state:  # element-wise second moments; row moments do not depend on U
                state["second"] = state["second"] @ switch.turn.square()
