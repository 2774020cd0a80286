"""The reparametrised form: trainable coordinates, in S by construction.

The state is the coordinates c, and so is the message; x = c·Uᵀ + T_fixed[tok].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomodels_cli.forms.base import Sizes, Switch
from protomodels_cli.forms.subspace import SubspaceForm
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


class Reparam(SubspaceForm):
    name = "reparam"
    about = "trains coordinates"
    remakes_stream = True

    @classmethod
    def state_width(cls, sizes: Sizes) -> int:
        return sizes.k

    @classmethod
    def reading_flops(cls, sizes: Sizes) -> int:
        # U has no gradient, so backward costs no more than forward.
        return 2 * 4 * sizes.k * sizes.width

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        u = self.basis.as_type(anchor.dtype)
        return torch.addmm(anchor.flatten(0, -2), state.to(anchor.dtype).flatten(0, -2), u.T).view_as(anchor)

    def rows(self, weight: Tensor) -> Tensor:
        return weight @ self.u.T

    def follow(self, weight: Tensor, switch: Switch) -> None:
        """transport: coordinates stay. project: (W·U)·(UᵀU′)."""
        if switch.move == "project":
            weight.copy_(weight @ switch.turn)
