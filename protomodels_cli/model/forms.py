"""The three forms of the residual stream, behind one interface.

A stage carries a *state* from block to block. What the state is, how a block reads the d-wide stream x from
it, and what crosses a boundary is all that differs:

              state            x (read)              message
  dense       x                x                     x                            (d numbers a token)
  constrained x                x                     (x − T_fixed[tok])·U         (k numbers)
  reparam     c                c·Uᵀ + T_fixed[tok]   c                            (k numbers)

`anchor` is T_fixed[tok]. Encode and decode are plain differentiable functions: their gradients are the method's
backward messages, G·U at the receiver of x and G_c·Uᵀ at its sender.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from protomodels_cli.model.basis import Basis


class Form(Protocol):
    def state_width(self, width: int) -> int: ...
    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor: ...
    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor: ...
    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor: ...
    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor: ...


class Dense:
    """An ordinary transformer; also what the last, unconstrained layers of the other forms are."""

    def state_width(self, width: int) -> int:
        return width

    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor:
        return rows

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        return state

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        return state

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        return message


class Constrained:
    """Full matrices whose written rows are kept in S by the optimizer."""

    def __init__(self, basis: Basis):
        self.basis = basis

    def state_width(self, width: int) -> int:
        return width

    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return rows + anchor

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        return state

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return (state - anchor) @ self.basis.u

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return message @ self.basis.u.T + anchor


class Reparam:
    """Trainable coordinates: in S by construction. The state is the coordinates, so nothing is subtracted."""

    def __init__(self, basis: Basis):
        self.basis = basis

    def state_width(self, width: int) -> int:
        return self.basis.u.shape[1]

    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor:
        return rows

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        assert anchor is not None
        return state @ self.basis.u.T + anchor

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        return state

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        return message
