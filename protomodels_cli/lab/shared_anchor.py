"""One trained anchor table that all segments share, played in one process: what would have to cross the wire for it.

Gradients of the touched rows are summed along the chain, from the last segment to the first; that one has the optimizer
and sends the change back, so that all segments read the same replica. Both ways may be quantised (one scale a row; what
rounding loses is added the next time), done every few steps only, and used some steps late. No pipeline does this:
it is here to say whether one should. A late sum is clipped with the step that it is used in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protomodels_cli.model.anchor import Anchor, Touched
from protomodels_cli.model.reference import Reference

SCALE_BYTES = 2  # of a row that is quantised
LEAST_SCALE = 1e-30


@dataclass(frozen=True)
class Sharing:
    bits: int | None = None  # of a number; None: float32, exact
    every: int = 1  # steps whose gradients are summed before they are sent
    late: int = 0  # steps until the sum is used

    @property
    def name(self) -> str:
        bits = "exact" if self.bits is None else f"int{self.bits}"
        return bits + (f" every {self.every}" if self.every > 1 else "") + (f" late {self.late}" if self.late else "")

    def row_bytes(self, width: int) -> float:
        return 4.0 * width if self.bits is None else width * self.bits / 8 + SCALE_BYTES


@dataclass
class Rows:
    """Some rows of a table, by id."""

    ids: Tensor
    values: Tensor


class SharedTable(Anchor):
    """Takes the place of the first segment's anchor in its stage's optimizer; the other stages' have none.

    Its weight is the master that the optimizer moves; what segments read is the replica."""

    def __init__(self, reference: Reference, sharing: Sharing):
        anchors = [module for stage in reference.stages for module in stage.modules() if isinstance(module, Anchor)]
        first = anchors[0].weight.detach()
        super().__init__(reference.stages[0].shape, segment=0)
        self.sharing, self.anchors = sharing, anchors
        self.weight, self.replica = nn.Parameter(first.clone()), nn.Parameter(first.clone())
        for anchor in self.anchors:
            anchor.weight = self.replica
        for trainer in reference.trainers:
            kept = []
            for trained in trainer.optimizer.parameters:
                if trained.anchor is self.anchors[0]:
                    trained.anchor, trained.parameter = self, self.weight
                if trained.anchor is None or trained.anchor is self:
                    kept.append(trained)
            trainer.optimizer.parameters = kept
        self._sums = [torch.zeros_like(first) for _ in self.anchors]  # each segment's own, since they were last sent
        self._errors = [torch.zeros_like(first) for _ in self.anchors[1:]]  # of what crossed each boundary
        self._seen = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        self._steps = 0
        self._under_way: deque[tuple[int, Rows]] = deque()  # sums, with the step from which on each is used
        self._used: Tensor | None = None
        self.rows_sent = 0  # over each boundary, each way

    @torch.no_grad()
    def take(self) -> Touched:
        """The rows that have a gradient in this step; none where no sum is due, and rows go on by their momentum."""
        touched = [found for anchor in self.anchors if (found := anchor.take()) is not None]
        if not touched:  # asked again, for a step that is skipped
            return self._as_touched(None)
        self._steps += 1
        ids = (touched[0].place >= 0).nonzero().flatten()  # all segments see the same tokens
        self._seen[ids] = True
        for total, one in zip(self._sums, touched, strict=True):
            total[ids] += one.gradients[one.place[ids]]
        if self._steps % self.sharing.every == 0:
            self._under_way.append((self._steps + self.sharing.late, self._send()))
        if self._under_way and self._under_way[0][0] <= self._steps:
            return self._as_touched(self._under_way.popleft()[1])
        return self._as_touched(None)

    def _send(self) -> Rows:
        """The sum of all segments' gradients along the chain, quantised at every boundary where that is asked for."""
        ids = self._seen.nonzero().flatten()
        total = self._sums[-1][ids]
        for boundary in reversed(range(len(self._errors))):
            if self.sharing.bits is not None:
                whole = total + self._errors[boundary][ids]
                total = quantised(whole, self.sharing.bits)
                self._errors[boundary][ids] = whole - total
            total = total + self._sums[boundary][ids]
        for own in self._sums:
            own.zero_()
        self._seen.zero_()
        self.rows_sent += len(ids)
        return Rows(ids, total)

    def _as_touched(self, rows: Rows | None) -> Touched:
        found = Touched(len(self.weight), 1, self.weight)
        if rows is not None:
            found.place[rows.ids] = torch.arange(len(rows.ids), device=rows.ids.device)
            found.gradients = rows.values
        self._used = None if rows is None else rows.ids
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer has moved the master: its change on those rows, as all segments add it."""
        if (ids := self._used) is None:
            return
        if self.sharing.bits is None:
            self.replica[ids] = self.weight[ids]
        else:
            self.replica[ids] += quantised(self.weight[ids] - self.replica[ids], self.sharing.bits)
        self._used = None

    def bytes_per_token(self, tokens: int) -> float:
        """Over each boundary, both ways, of so many tokens of training."""
        return 2 * self.rows_sent * self.sharing.row_bytes(self.weight.shape[1]) / tokens


def quantised(rows: Tensor, bits: int) -> Tensor:
    """What arrives of rows that travel as whole numbers of so many bits and a bfloat16 scale each."""
    levels = 2 ** (bits - 1) - 1
    scale = (rows.abs().amax(1, keepdim=True) / levels).to(torch.bfloat16).to(rows.dtype).clamp(min=LEAST_SCALE)
    return (rows / scale).round().clamp(-levels, levels) * scale
