"""A form with a state of its own: two halves of d numbers, whose difference is x. A message is x.

Good for nothing but to be unlike the forms that pmtrain has: wider than the stream inside, as wide outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomodels_cli.forms import Form, Sizes
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


class Split(Form):
    name = "toysplit"
    about = "carries x as the difference of two halves"

    @classmethod
    def state_width(cls, sizes: Sizes) -> int:
        return 2 * sizes.width

    @classmethod
    def optimizer_problem(cls, optimizer: str) -> tuple[str, str] | None:
        if optimizer != "adamw":
            return "two halves of one matrix are no matrix that Muon could orthogonalise", "use adamw"
        return None

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        plus, minus = state.chunk(2, dim=-1)
        return plus - minus

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        return self.read(state, anchor)

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        return torch.cat((message, torch.zeros_like(message)), dim=-1)

    def rows(self, weight: Tensor) -> Tensor:
        return self.read(weight, None)
