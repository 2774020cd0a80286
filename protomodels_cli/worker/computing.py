"""How this peer computes the stages that it is assigned: chosen from its device and memory, and told in one line.

It must not know the coordinator, nor when a stage is built.
"""

from __future__ import annotations

from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.recompute import Picked, pick_over
from protomodels_cli.model.arithmetic import choose
from protomodels_cli.model.shape import Slice
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.device import computation_of
from protomodels_cli.worker.notices import Building, Computing


class Chooser:
    def __init__(self, cards: Cards):
        self._cards = cards
        self._forecast = 0

    def pick(self, spec: RunSpec, slice_: Slice, share: int) -> Picked:
        """For a stage of this spec's cut; `share`: bytes that the coordinator leaves to it, 0: it has not said."""
        cards, sizes = self._cards, StageMemory(spec)
        share = min(share or cards.offered, cards.offered)
        rooms = [room * share // cards.offered for room in cards.rooms]
        if cards.host_memory is None:
            rooms[0] -= sizes.on_host(slice_.first_layer, slice_.end_layer)
        after, layers = len(layers_per_stage(spec)) - 1 - slice_.index, cards.layers(spec, slice_)
        used = [(part, room) for part, room in zip(layers, rooms, strict=True) if part]
        found = pick_over(sizes, used, after, computation_of(spec, *cards.devices))
        self._forecast = found.bytes
        return found

    def notices(self, spec: RunSpec, found: Picked, reuse: bool) -> list[Computing | Building]:
        """`reuse`: of a stage in memory, which nothing has to be compiled for."""
        arithmetic = choose(spec.compute, *self._cards.devices)
        computing = Computing(
            self._cards.in_words,
            arithmetic.name,
            spec.compute.dtype == "auto",
            arithmetic.compiled,
            found.recompute,
            found.why,
            found.in_flight,
            found.bytes,
            found.memory,
            found.kept_bytes,
        )
        return [computing, Building()] if arithmetic.compiled and not reuse else [computing]

    def memory_used(self) -> dict[str, int]:
        """Fields of a usage."""
        return {**self._cards.memory_used(), "forecast_memory": self._forecast}
