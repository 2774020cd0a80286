"""The devices of one peer: mostly one; with `--devices` several cards, over which it lays each stage's layers in order.

To the coordinator they are one device: their memory together, the speed of one at a time. It must not know who asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protomodels_cli.cost.cards import laid_over, offered
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.model.shape import Slice
from protomodels_cli.model.stage import Layout
from protomodels_cli.observe.process import peak_memory
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.worker import device as devices_
from protomodels_cli.worker.device import computation_of


@dataclass(frozen=True)
class Cards:
    devices: tuple[torch.device, ...]  # in the order of the layers; one that is named twice is as two halves of it
    free: int  # bytes, of all of them
    rooms: tuple[int, ...]  # bytes that the peer may use on each
    offered: int  # bytes that it tells the coordinator of

    @classmethod
    def of(cls, devices: Sequence[torch.device], spec: RunSpec, most: int | None = None) -> Cards:
        """`most`: bytes that the peer may use in all, shared out as the cards' free memory is."""
        named = Counter(devices)
        free = {device: devices_.free_memory(device) for device in named}
        total = sum(free.values())
        whole = total if most is None else min(total, most)
        rooms = tuple(free[device] * whole // max(1, total) // named[device] for device in devices)
        return cls(tuple(devices), total, rooms, offered(StageMemory(spec), computation_of(spec, *devices), rooms))

    @property
    def first(self) -> torch.device:
        return self.devices[0]

    @property
    def distinct(self) -> list[torch.device]:
        return list(dict.fromkeys(self.devices))

    @property
    def in_words(self) -> str:
        names = Counter(map(devices_.in_words, self.devices))
        return " + ".join(name if n == 1 else f"{n} × {name}" for name, n in names.items())

    @property
    def names(self) -> str:
        return ",".join(map(str, self.devices))

    @property
    def ids(self) -> str:
        """What peers on the same cards have in common, separated by commas; empty: not known."""
        return ",".join(dict.fromkeys(filter(None, map(devices_.card, self.devices))))

    @property
    def host_memory(self) -> int | None:
        return devices_.host_memory(self.first)

    def layout(self, spec: RunSpec, slice_: Slice) -> Layout:
        """What lies where of a stage of this spec's cut."""
        return [
            (device, layers) for device, layers in zip(self.devices, self.layers(spec, slice_), strict=True) if layers
        ]

    def layers(self, spec: RunSpec, slice_: Slice) -> list[range]:
        """The stage's layers on each card. Always the same, so that a stage in memory can be used again."""
        after = len(layers_per_stage(spec)) - 1 - slice_.index
        return laid_over(StageMemory(spec), slice_.layers, after, computation_of(spec, *self.devices), self.rooms)

    def measure_flops(self, spec: RunSpec) -> float:
        """Operations a second where each card has as much to do: the cards take turns."""
        speeds = {device: devices_.measure_flops(spec, device) for device in self.distinct}
        return len(self.devices) / sum(1 / speeds[device] for device in self.devices)

    def limit_memory(self) -> None:
        """Make torch refuse more than there is room for."""
        for card in self.distinct:
            rooms = (room for device, room in zip(self.devices, self.rooms, strict=True) if device == card)
            devices_.limit_memory(card, sum(rooms))

    def reset_peak(self) -> None:
        if self.first.type == "cuda":
            for card in self.distinct:
                torch.cuda.reset_peak_memory_stats(card)

    def memory_used(self) -> dict[str, int]:
        """Fields of a usage: of GPUs what torch had there; of the CPU the whole process."""
        if self.first.type != "cuda":
            return {"peak_memory": peak_memory()}
        return {
            "peak_memory": sum(map(torch.cuda.max_memory_allocated, self.distinct)),
            "reserved_memory": sum(map(torch.cuda.max_memory_reserved, self.distinct)),
        }
