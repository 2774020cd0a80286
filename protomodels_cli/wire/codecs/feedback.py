"""Codecs that remember: what was lost, what was last sent, what a sample looked like when it last came by.

A memory belongs to one leg over one boundary at one end. It is staged while a step is under way and committed when the
step is applied; a step that is skipped or dropped leaves no trace, at either end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from protomodels_cli.wire.codecs.base import LARGEST, Codec, Layout, Slot


class Memory:
    """Tensors by name, in two layers: those of applied steps, and over them those of the step under way."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        found = self._staged.get(name)
        return self.kept.get(name) if found is None else found

    def put(self, name: str, tensor: Tensor) -> None:
        self._staged[name] = tensor

    def decide(self, apply: bool) -> None:
        if apply:
            self.kept |= self._staged
        self._staged.clear()

    def reset(self) -> None:
        self.kept.clear()
        self._staged.clear()


def _sum(a: Tensor, b: Tensor | None) -> Tensor:
    """Of two finite tensors, finite; a memory that was restored may be on another device."""
    return a if b is None else (a + b.to(a.device)).clamp(-LARGEST, LARGEST)


class EF:
    """Error feedback: send C(x + e), keep e ← x + e − C(x + e). The receiver remembers nothing."""

    def __init__(self, codec: Codec, memory: Memory):
        self.codec, self.memory = codec, memory

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        whole = _sum(message.clamp(-LARGEST, LARGEST), self.memory.get("error"))
        parts = self.codec.encode(whole, slot)
        self.memory.put("error", whole - self.codec.decode(parts, slot))
        return parts

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        return self.codec.decode(parts, slot)

    def layout(self, slot: Slot) -> Layout:
        return self.codec.layout(slot)


class EF21:
    """Both ends keep A: send C(x − A), then A ← A + C(x − A), which is what arrives."""

    def __init__(self, codec: Codec, memory: Memory):
        self.codec, self.memory = codec, memory

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        mirror = self.memory.get("mirror")
        x = message.clamp(-LARGEST, LARGEST)
        parts = self.codec.encode(x if mirror is None else _sum(x, -mirror), slot)
        self.decode(parts, slot)
        return parts

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        mirror = _sum(self.codec.decode(parts, slot), self.memory.get("mirror"))
        self.memory.put("mirror", mirror)
        return mirror

    def layout(self, slot: Slot) -> Layout:
        return self.codec.layout(slot)


class AQSGD:
    """Both ends keep every sample's last message: the first goes whole, later ones as C(x − last).

    The cache is in the machine's own memory, wherever the stage computes: it has one entry for each sample.
    """

    def __init__(self, codec: Codec, memory: Memory):
        self.codec, self.memory = codec, memory

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        x, (new, old) = message.clamp(-LARGEST, LARGEST), self._split(slot)
        parts = [x[new]] if new else []
        if old:
            parts += self.codec.encode(_sum(x[old], -self._last(slot, old, x.device)), _rows(slot, old))
        self.decode(parts, slot)
        return parts

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        new, old = self._split(slot)
        whole = torch.empty(slot.shape, dtype=slot.dtype, device=parts[0].device)
        if new:
            whole[new] = parts[0]
        if old:
            change = self.codec.decode(parts[1 if new else 0 :], _rows(slot, old))
            whole[old] = _sum(change, self._last(slot, old, change.device))
        for sample, row in zip(slot.samples, whole.cpu(), strict=True):
            self.memory.put(sample, row.clone())
        return whole

    def layout(self, slot: Slot) -> Layout:
        new, old = self._split(slot)
        whole: Layout = [((len(new), *slot.shape[1:]), slot.dtype)] if new else []
        return whole + (self.codec.layout(_rows(slot, old)) if old else [])

    def _split(self, slot: Slot) -> tuple[list[int], list[int]]:
        """Rows whose sample is new, and rows whose sample was seen."""
        seen = [self.memory.get(sample) is not None for sample in slot.samples]
        return [i for i, s in enumerate(seen) if not s], [i for i, s in enumerate(seen) if s]

    def _last(self, slot: Slot, rows: list[int], device: torch.device) -> Tensor:
        last = [self.memory.get(slot.samples[i]) for i in rows]
        return torch.stack([row for row in last if row is not None]).to(device)


def _rows(slot: Slot, rows: list[int]) -> Slot:
    return replace(slot, shape=(len(rows), *slot.shape[1:]), samples=())
