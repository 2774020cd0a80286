"""An optimizer's moments of one parameter: how they start, and how they are kept in bfloat16.

With β₂ near 1 a step moves a second moment by less than half of what tells two bfloat16 numbers apart, and rounding to
the nearest would lose it every time. So a number is rounded up as often as what is cut off says: right in the mean. The
random bits belong to run, parameter, moment and step, whatever the cut and whoever restored the stage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.forms import Rule

State = dict[str, Tensor]


def new_state(rule: Rule, parameter: Tensor, dtype: torch.dtype, columns: int | None = None) -> State:
    """Row by row in memory, as state from a snapshot is: with another layout products may round differently. One
    second moment a row is so little that it stays in the parameter's type. `columns`: where the optimizer sees fewer
    than the parameter has."""
    own = parameter.shape if columns is None else (*parameter.shape[:-1], columns)

    def zeros() -> Tensor:
        return torch.zeros(own, dtype=dtype, device=parameter.device)

    match rule:
        case "muon":
            return {"first": zeros()}
        case "adamw":
            return {"first": zeros(), "second": zeros()}
        case "row_adamw":
            return {"first": zeros(), "second": parameter.new_zeros(len(parameter), 1)}


def round_stochastically(wide: Tensor, kept: Tensor, seed: int, start: int) -> None:
    """Write float32 numbers into bfloat16 ones. `start`: the place of the first in the stream of `seed`."""
    # A bfloat16 is the upper half of a float32: 16 random bits carry into it as often as the lower half says.
    bits = counter.quarters_on(seed, start, wide.numel(), wide.device).to(torch.int32).bitwise_and_(0xFFFF)
    bits = bits.view(wide.shape).add_(wide.view(torch.int32)).bitwise_and_(-0x10000)
    kept.copy_(torch.where(wide.isfinite(), bits.view(torch.float32), wide))
