"""Byte codecs: a message tensor to the bytes that are sent, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from protomodels_cli.spec.schema import WireSpec

Leg = Literal["forward", "backward"]
Carry = Callable[[Tensor, Leg], Tensor]


def _wire_type(codec: str, dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if codec == "bf16" else dtype


def pack(message: Tensor, codec: str) -> bytes:
    numbers = message.detach().to("cpu", _wire_type(codec, message.dtype)).contiguous()
    return numbers.flatten().view(torch.uint8).numpy().tobytes()


def unpack(payload: bytes, codec: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = torch.frombuffer(bytearray(payload), dtype=_wire_type(codec, dtype))
    return numbers.view(shape).to(dtype)


def carrier(wire: WireSpec) -> Carry:
    """The crossing of a boundary as one function: what comes out is what the receiver will compute with."""

    def carry(message: Tensor, leg: Leg) -> Tensor:
        codec = wire.forward if leg == "forward" else wire.backward
        received = unpack(pack(message, codec), codec, tuple(message.shape), message.dtype)
        return received.to(message.device)

    return carry
