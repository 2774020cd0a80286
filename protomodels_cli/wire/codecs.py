"""Codecs: what a message's numbers become on their way over a boundary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from protomodels_cli.spec.schema import WireSpec

Leg = Literal["forward", "backward"]
Carry = Callable[[Tensor, Leg], Tensor]


def carrier(wire: WireSpec) -> Carry:
    """The crossing of a boundary as one function: what comes out is what the receiver computes with."""

    def carry(message: Tensor, leg: Leg) -> Tensor:
        codec = wire.forward if leg == "forward" else wire.backward
        if codec == "bf16":
            return message.detach().to(torch.bfloat16).to(message.dtype)
        return message.detach()

    return carry
