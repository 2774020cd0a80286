"""The form `relay`, for comparison only: within a segment an ordinary stream, and c that is passed on.

x = anchor[tok] + c·B at a segment's start, c ← c + RMSNorm(x)·A at its end; A and B are random, orthonormal, frozen and
each segment's own. No run can choose it: it is known to the process that made an experiment's model alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.forms.two_stream import LocalStream

if TYPE_CHECKING:
    from protomodels_cli.model.reference import Reference


class Relay(LocalStream):
    name = "relay"
    about = "passes coordinates on from segment to segment"

    _c: Tensor  # of the microbatch at hand: it goes through a segment before the next one comes

    def __init__(self, basis: Any = None):
        super().__init__(basis)
        self.a, self.b = self.u, self.u.T  # until `give_ends`: a stage is tried before it is whole

    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor:
        return self.decode(rows, anchor)

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        self._c = message
        return (anchor + message.to(anchor.dtype) @ self.b.to(anchor.dtype)).to(message.dtype)

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        normed = F.rms_norm(state, state.shape[-1:]).to(anchor.dtype)
        return self._c + (normed @ self.a.to(anchor.dtype)).to(state.dtype)


def give_ends(reference: Reference) -> None:
    """To every segment its own A and B; a stage is a segment here."""
    for stage in reference.stages:
        form = stage.form
        assert isinstance(form, Relay)
        form.a, form.b = (
            orthonormal(stage.shape.width, stage.shape.sizes.k, reference.spec.seed, "relay", name, stage.slice.index)
            for name in ("a", "b")
        )
        form.a, form.b = form.a.to(reference.device), form.b.T.contiguous().to(reference.device)


def orthonormal(width: int, k: int, seed: int, *names: str | int) -> Tensor:
    generator = torch.Generator().manual_seed(counter.subseed(seed, *names) >> 1)
    return torch.linalg.qr(torch.randn(width, k, generator=generator))[0]
