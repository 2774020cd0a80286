"""The form `mapl`, for comparison only: MAPL (arXiv 2606.05484), with both ends of a boundary on their own.

An ordinary stream within a segment. At its end the sender takes its anchor away and projects, z = (x − anchor[tok])·A;
the receiver begins with x = anchor[tok] + z·Bᵀ. A and B have orthonormal columns, start equal, and are trained on the
Stiefel manifold in every step, each by what its own end knows, so that nothing else is sent; the paper ties the two.
Its anchors are small tables times a fixed lift; here they are whole, as those of other forms. No run can choose it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protomodels_cli.forms.base import Sizes
from protomodels_cli.forms.two_stream import LocalStream
from protomodels_cli.lab.relay import orthonormal
from protomodels_cli.model.rules import MUON_RMS

if TYPE_CHECKING:
    from protomodels_cli.model.reference import Reference

MOMENTUM = 0.95
RATE = 0.1  # of the matrices'


class Mapl(LocalStream):
    name = "mapl"
    about = "projects an ordinary stream at each boundary, with trained projectors"

    def __init__(self, basis: Any = None):
        super().__init__(basis)
        self.a = self.b = self.u  # until there are projectors: a stage is tried before it is whole

    @classmethod
    def embedding_width(cls, sizes: Sizes) -> int:
        return sizes.width

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return anchor.to(message.dtype) + (message.to(anchor.dtype) @ self.b.T.to(anchor.dtype)).to(message.dtype)

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        new = state - anchor.to(state.dtype)  # before it is rounded to the type that matrices are multiplied in
        return (new.to(anchor.dtype) @ self.a.to(anchor.dtype)).to(state.dtype)


class Projectors:
    """Both ends of every boundary, d×k each, and the rule that trains them; a stage is a segment here."""

    def __init__(self, reference: Reference):
        self.ends: list[Tensor] = []
        for sender, receiver in pairwise(reference.stages):
            sizes = sender.shape.sizes
            start = orthonormal(sizes.width, sizes.k, reference.spec.seed, "mapl", sender.slice.index)
            a, b = (start.to(reference.device, copy=True).requires_grad_() for _ in range(2))
            assert isinstance(sender.form, Mapl)
            assert isinstance(receiver.form, Mapl)
            sender.form.a, receiver.form.b = a, b
            self.ends += [a, b]
        self.moments = [torch.zeros_like(end) for end in self.ends]

    @property
    def numbers(self) -> int:
        return sum(end.numel() for end in self.ends)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Along the manifold against the gradient's momentum, as far as Muon would go, and back onto the manifold."""
        for end, moment in zip(self.ends, self.moments, strict=True):
            assert end.grad is not None
            moment.mul_(MOMENTUM).add_(_tangent(end, end.grad))
            far = RATE * rate * MUON_RMS * math.sqrt(max(end.shape))
            end.copy_(_polar(end - far * _polar(_tangent(end, moment))))

    def forget(self) -> None:
        for end in self.ends:
            end.grad = None


def _tangent(point: Tensor, gradient: Tensor) -> Tensor:
    product = point.T @ gradient
    return gradient - point @ (product + product.T) / 2


def _polar(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right
