"""How this peer computes the stages that it is assigned: chosen from its device and memory, and told in one line.

It must not know the coordinator, nor when a stage is built.
"""

from __future__ import annotations

import torch

from protomodels_cli.cost.activations import Path
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.recompute import Picked, pick
from protomodels_cli.model.arithmetic import choose
from protomodels_cli.model.shape import Slice
from protomodels_cli.observe.process import peak_memory
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.worker import device as devices
from protomodels_cli.worker.notices import Computing


def path_of(spec: RunSpec, device: torch.device) -> Path:
    arithmetic = choose(spec.compute, device)
    dtype = "bf16" if arithmetic.matmul == torch.bfloat16 else spec.compute.stored
    return Path(dtype, arithmetic.compiled, gpu=device.type == "cuda")


class Chooser:
    """`memory`: bytes that the peer may use of its device; None: all that is free."""

    def __init__(self, device: torch.device, memory: int | None):
        self._device = device
        self._memory = devices.free_memory(device) if memory is None else memory
        self._forecast = 0

    def pick(self, spec: RunSpec, layers: Slice, share: int, reuse: bool) -> Picked:
        """For a stage of this spec's cut; `share`: bytes that the coordinator leaves to it, 0: it has not said."""
        room = min(self._memory, share) if share else self._memory
        sizes = StageMemory(spec)
        if devices.host_memory(self._device) is None:
            room -= sizes.on_host(layers.first_layer, layers.end_layer)
        after = len(layers_per_stage(spec)) - 1 - layers.index
        found = pick(sizes, layers.first_layer, layers.end_layer, after, path_of(spec, self._device), room)
        self._forecast = found.bytes
        if self._device.type == "cuda" and not reuse:
            torch.cuda.reset_peak_memory_stats(self._device)
        return found

    def notice(self, spec: RunSpec, found: Picked) -> Computing:
        arithmetic = choose(spec.compute, self._device)
        return Computing(
            devices.in_words(self._device),
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

    def memory_used(self) -> dict[str, int]:
        """Fields of a usage: of a GPU what torch had there; of the CPU the whole process."""
        if self._device.type != "cuda":
            return {"peak_memory": peak_memory(), "forecast_memory": self._forecast}
        return {
            "peak_memory": torch.cuda.max_memory_allocated(self._device),
            "reserved_memory": torch.cuda.max_memory_reserved(self._device),
            "forecast_memory": self._forecast,
        }
