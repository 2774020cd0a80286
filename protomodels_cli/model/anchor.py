"""The trained change of an anchor: a row for each token, of which a step sees some.

A stage holds a table for each of its segments, of vocabulary × width by far its largest parameter. So there is never a
gradient of the table's size: only of the rows that a step's tokens touch, in the order in which they were first seen.
Yet the optimizer moves all rows in every step. A row's momentum carries it on for some steps after its token was seen;
where a row moves only when it is seen, the rare ones go a fraction of the way (docs/method.md has what that costs).
Of a lower rank, a table is as narrow as that, and a fixed random matrix lifts its rows to the stream's width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from protomodels_cli import counter
from protomodels_cli.model.operators import signed_rows
from protomodels_cli.model.products import add_rows
from protomodels_cli.model.shape import Shape
from protomodels_cli.protocol.t_fixed import packed_signs


class Touched:
    """The gradients of the rows that a step has touched so far. Nothing here waits for the device."""

    def __init__(self, rows: int, most: int, like: Tensor):
        """`rows` of the table, of which a step can touch `most`."""
        device = like.device
        self.place = torch.full((rows,), -1, dtype=torch.int64, device=device)  # of a row's gradient; -1: none yet
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.gradients = torch.zeros((most, like.shape[1]), dtype=like.dtype, device=device)

    def add(self, tokens: Tensor, gradients: Tensor) -> None:
        seen = torch.zeros_like(self.place, dtype=torch.bool)
        seen[tokens] = True
        new = seen & (self.place < 0)
        self.place = torch.where(new, self.count + new.cumsum(0) - 1, self.place)
        self.count = self.count + new.sum()
        add_rows(self.gradients, self.place[tokens], gradients)

    def rows(self, span: slice) -> Tensor:
        """The gradients of these rows of the table: zeros where a step has not touched them."""
        place = self.place[span].unsqueeze(1)
        return self.gradients[place.squeeze(1).clamp(min=0)].masked_fill_(place < 0, 0)


class Taps(nn.Module):
    """Adds to a token's row those of the tokens before it in the window, each channel with a weight of its own. Two
    layers have little time to find out what came just before, and each segment begins anew."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.anchor_tokens - 1, shape.width, dtype=shape.dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return Mix.apply(rows, self.weight)


class Anchor(nn.Module):
    def __init__(self, shape: Shape, segment: int):
        """`segment`: its first layer."""
        super().__init__()
        self.taps = Taps(shape) if shape.anchor_tokens > 1 else None
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.anchor_width, dtype=shape.dtype))
        self.most = min(shape.vocab_size, shape.tokens_in_step)
        self.touched: Touched | None = None
        self._lifts_to = shape.width if shape.anchor_width < shape.width else None
        self._seed = counter.subseed(shape.t_fixed_seed, "lift", segment)
        self._lift: Tensor | None = None  # made where it is first needed

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lifted(Change.apply(tokens, self.weight, self))

    def mixed(self, rows: Tensor | None) -> Tensor | None:
        """The whole anchor's, whatever it is the sum of."""
        return rows if rows is None or self.taps is None else self.taps(rows)

    def lifted(self, rows: Tensor) -> Tensor:
        """Rows of the table at the stream's width: as they are, or by signs that are fixed, as T_fixed's are."""
        if self._lifts_to is None:
            return rows
        if self._lift is None:
            rank = rows.shape[-1]
            packed = torch.from_numpy(packed_signs(rank, self._lifts_to, self._seed)).to(rows.device)
            self._lift = signed_rows(packed, self._lifts_to, rank**-0.5, rows.dtype)
        return rows @ self._lift

    def add_gradients(self, tokens: Tensor, gradients: Tensor) -> None:
        if self.touched is None:
            self.touched = Touched(len(self.weight), self.most, self.weight)
        self.touched.add(tokens.flatten(), gradients.flatten(0, -2).to(self.weight.dtype))

    def take(self) -> Touched | None:
        """What has been touched since the last time."""
        touched, self.touched = self.touched, None
        return touched


class Mix(torch.autograd.Function):
    """What Taps computes, keeping nothing but the rows."""

    @staticmethod
    def forward(ctx: Any, rows_BTD: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(rows_BTD, weight)
        mixed = rows_BTD.clone()
        for back, channels in enumerate(weight.to(rows_BTD.dtype), 1):
            mixed[:, back:] += rows_BTD[:, :-back] * channels
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows_BTD, weight = ctx.saved_tensors
        of_rows, of_weight = gradient.clone(), torch.empty_like(weight)
        for back, channels in enumerate(weight.to(gradient.dtype), 1):
            later = gradient[:, back:]
            of_rows[:, :-back] += later * channels
            of_weight[back - 1] = (later * rows_BTD[:, :-back]).sum((0, 1), dtype=weight.dtype)
        return of_rows, of_weight


class Change(torch.autograd.Function):
    """The rows of some tokens. `weight` is named so that autograd knows of it; its gradient goes to the anchor."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: nn.Parameter, anchor: Anchor) -> Tensor:
        ctx.tokens, ctx.anchor = tokens, anchor
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.anchor.add_gradients(ctx.tokens, gradient)
        return None, None, None
