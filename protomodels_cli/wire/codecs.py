"""Codecs: what a message's numbers become on their way over a boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from protomodels_cli.model.stage import Carry, Leg
from protomodels_cli.spec.schema import WireSpec


def carrier(wire: WireSpec) -> Carry:
    """The spec's crossing of a boundary."""

    def carry(message: Tensor, leg: Leg) -> Tensor:
        codec = wire.forward if leg == "forward" else wire.backward
        if codec == "bf16":
            return message.detach().to(torch.bfloat16).to(message.dtype)
        return message.detach()

    return carry
