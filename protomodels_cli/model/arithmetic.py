"""How a stage computes on its device: in which type it multiplies, and whether its operators are compiled.

Weights, gradients, optimizer state and what crosses a boundary are float32 whatever is chosen here (float64 for
float64), so a snapshot is the same for every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protomodels_cli.model.compiling import is_known_to_fail
from protomodels_cli.spec.schema import ComputeSpec

PRODUCTS = {"bf16": torch.bfloat16}  # of others than the weights' own type
BF16_SINCE = (8, 0)  # CUDA's compute capability from which bfloat16 is multiplied by tensor cores


@dataclass(frozen=True)
class Arithmetic:
    name: str  # as compute.dtype has it, `auto` resolved
    stored: torch.dtype  # weights, gradients, moments, the stream from block to block
    matmul: torch.dtype  # what matrices are multiplied in
    compiled: bool

    def prepare(self, *devices: torch.device) -> None:
        """Set what torch keeps for the whole process."""
        if any(device.type == "cuda" for device in devices):
            torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")


def choose(compute: ComputeSpec, *devices: torch.device) -> Arithmetic:
    """For a stage on this device, or over these: then what all of them are good at."""
    name = compute.dtype
    if name == "auto":
        name = "bf16" if all(map(_has_bf16, devices)) else "float32"
    on_gpus = all(device.type == "cuda" for device in devices)
    if name == "tf32" and not on_gpus:
        name = "float32"
    stored = getattr(torch, compute.stored)
    matmul = PRODUCTS.get(name, stored)
    wanted = compute.compile == "always" or (compute.compile == "auto" and on_gpus)
    return Arithmetic(name, stored, matmul, wanted and not any(map(is_known_to_fail, devices)))


def _has_bf16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_SINCE
