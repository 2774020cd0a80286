"""Codecs: what a message's numbers become on their way over a boundary, and the bytes that carry them.

A codec is a pair of pure functions on tensors, so that the reference crosses a boundary with the very numbers that a
socket would deliver; `pack` and `unpack` turn its parts into bytes and back. Nothing here knows sockets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.model.stage import Carry, Place
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.frames import BadMessage

Layout = list[tuple[tuple[int, ...], torch.dtype]]


class Codec(Protocol):
    def encode(self, message: Tensor, place: Place) -> list[Tensor]:
        """The parts that travel, on the message's device."""
        ...

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor: ...

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Shapes and types of the parts of a message: what a receiver expects, to the byte."""
        ...


class Plain:
    """The stage's own numbers."""

    def encode(self, message: Tensor, place: Place) -> list[Tensor]:
        return [message]

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return parts[0]

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        return [(shape, dtype)]


class BF16:
    def encode(self, message: Tensor, place: Place) -> list[Tensor]:
        return [message.to(torch.bfloat16)]

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        return [(shape, torch.bfloat16)]


class Int8:
    """A byte a number and a bfloat16 scale a token, rounded up so that nothing exceeds ±127.

    Activations are rounded to nearest. Gradients are rounded up or down at random with the true value as the mean: an
    error that leans one way would add up over the steps. A token with a non-finite number gets a NaN scale.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def encode(self, message: Tensor, place: Place) -> list[Tensor]:
        x = message.float()
        scale = _bf16_not_below(x.abs().amax(-1, keepdim=True) / 127)
        divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        quotient = (x / divisor).nan_to_num(0.0)
        if place.leg == "backward":
            below = quotient.floor()
            seed = counter.subseed(self.seed, "int8", place.step, place.microbatch, place.boundary, place.leg)
            quotient = below + (_uniform(seed, quotient) < quotient - below)
        else:
            quotient = quotient.round()
        return [scale.squeeze(-1), quotient.clamp(-127, 127).to(torch.int8)]

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        scale, quotient = parts
        return (quotient.float() * scale.float().unsqueeze(-1)).to(dtype)

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        return [(shape[:-1], torch.bfloat16), (shape, torch.int8)]


def _bf16_not_below(x: Tensor) -> Tensor:
    """The nearest bfloat16 that is at least x ≥ 0."""
    near = x.to(torch.bfloat16)
    up = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, up, near)


def _uniform(seed: int, like: Tensor) -> Tensor:
    """Numbers in [0, 1) on a grid of 2⁻²⁴, entry i from word i of the counter's stream: equal on every device."""
    return (counter.words_on(seed, like.numel(), like.device) >> 39).view(like.shape).float() * 2.0**-24


def codec_for(spec: RunSpec, leg: str) -> Codec:
    name = spec.wire.backward if leg == "backward" else spec.wire.forward
    codecs: dict[str, Codec] = {"fp32": Plain(), "bf16": BF16(), "int8": Int8(spec.seed)}
    return codecs[name]


def carrier(spec: RunSpec) -> Carry:
    """The spec's crossing of a boundary, within one process."""
    codecs = {leg: codec_for(spec, leg) for leg in ("forward", "backward", "evaluation")}

    def carry(message: Tensor, place: Place) -> Tensor:
        codec = codecs[place.leg]
        return codec.decode(codec.encode(message.detach(), place), message.dtype)

    return carry


def pack(parts: Sequence[Tensor]) -> bytes:
    return b"".join(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for p in parts)


def unpack(payload: bytes, layout: Layout) -> list[Tensor]:
    """The parts, each in memory of its own: torch aligns it, and unaligned numbers may add up differently."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout]
    if sum(sizes) != len(payload):
        raise BadMessage(f"a payload of {len(payload)} bytes where {sum(sizes)} belong")
    parts, offset = [], 0
    for (shape, dtype), size in zip(layout, sizes, strict=True):
        raw = torch.empty(size, dtype=torch.uint8)
        raw.numpy()[:] = np.frombuffer(payload, np.uint8, size, offset)
        parts.append(raw.view(dtype).view(shape))
        offset += size
    return parts


def pack_ids(tokens: np.ndarray, width: int) -> bytes:
    """Token ids, little-endian, `width` bytes each."""
    return np.ascontiguousarray(tokens, "<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def unpack_ids(payload: bytes, width: int, columns: int, vocab_size: int) -> np.ndarray:
    """Rows of `columns` ids, as int64. Refuses any that the vocabulary does not have."""
    if len(payload) % (width * columns):
        raise BadMessage(f"{len(payload)} bytes of token ids are no whole windows of {columns}")
    wide = np.zeros((len(payload) // width, 4), np.uint8)
    wide[:, :width] = np.frombuffer(payload, np.uint8).reshape(-1, width)
    tokens = wide.view("<u4").astype(np.int64).reshape(-1, columns)
    if tokens.size and tokens.max() >= vocab_size:
        raise BadMessage(f"token id {tokens.max()} where the vocabulary has {vocab_size}")
    return tokens
