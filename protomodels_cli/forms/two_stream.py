"""Two streams: coordinates c that go through all segments, and a full-width stream r that lives within one.

The state is c and r side by side, k + d numbers a token; x = anchor[tok] + c·Uᵀ + r. What is sent is c; r starts at 0
in each segment, and the last matrix of a segment writes to c alone. So c has an exact identity from the first block to
the last segment, and r gives each segment its full rank. The last segment sends nothing, and its layers write to x
itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomodels_cli.forms.base import START_DENSE, Form, Sizes
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch = lazy_import("torch")
    F = lazy_import("torch.nn.functional")


class LocalStream(Form):
    """Of a segment: k numbers a token come in and go out, and the last segment writes to x itself."""

    has_basis = True
    has_local_stream = True

    @classmethod
    def embedding_width(cls, sizes: Sizes) -> int:
        return sizes.k

    @classmethod
    def boundary_width(cls, sizes: Sizes) -> int:
        return sizes.k

    @classmethod
    def free_layers(cls, sizes: Sizes) -> int:
        return sizes.last_segment

    @classmethod
    def least_last_layers(cls, sizes: Sizes) -> int:
        return sizes.last_segment


class TwoStream(LocalStream):
    name = "two_stream"
    about = "trains coordinates and a full-width stream that ends with its segment"
    remakes_stream = True
    trains_anchors = True
    early_loss = 0.3

    @classmethod
    def state_width(cls, sizes: Sizes) -> int:
        return sizes.k + sizes.width

    @classmethod
    def closing_width(cls, sizes: Sizes) -> int:
        return sizes.k

    @classmethod
    def reading_flops(cls, sizes: Sizes) -> int:
        # U has no gradient, so backward costs no more than forward.
        return 2 * 4 * sizes.k * sizes.width

    @classmethod
    def update_problem(cls) -> str | None:
        return "with two streams, what lies outside the subspace is written beside it, and moving U gains nothing"

    @classmethod
    def free_layers_problem(cls, sizes: Sizes, asked: int) -> tuple[str, str] | None:
        if asked == sizes.last_segment:
            return None
        return (
            f"with two streams the layers of the last segment write to x itself, and those are {sizes.last_segment}",
            "remove `unconstrained_layers`, or change model.segments",
        )

    @classmethod
    def init_problem(cls) -> tuple[str, str] | None:
        return (
            "what the blocks of an ordinary transformer write does not end with a segment, as most of it does in the "
            f"{cls.name} form",
            START_DENSE,
        )

    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor:
        return self.decode(rows, anchor)

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        k, dtype = self.u.shape[1], anchor.dtype
        c, r = state[..., :k].to(dtype), state[..., k:].to(dtype)
        u = self.basis.as_type(dtype)
        return torch.addmm((anchor + r).flatten(0, -2), c.flatten(0, -2), u.T).view_as(anchor)

    def rows(self, weight: Tensor) -> Tensor:
        """Within the segment; of the embedding, whose rows are coordinates alone, for good."""
        k = self.u.shape[1]
        carried = weight[:, :k] @ self.u.T
        return carried + weight[:, k:] if weight.shape[1] > k else carried

    def add(self, state: Tensor, written: Tensor) -> Tensor:
        """At a segment's end c alone is left."""
        columns = written.shape[-1]
        return (state if columns == state.shape[-1] else state[..., :columns]) + written

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        return state[..., : self.u.shape[1]].contiguous()

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        return F.pad(message, (0, self.u.shape[0]))
