"""Where float64 numbers live: beside the model, or on the CPU where the device has none (Apple's GPU)."""

from __future__ import annotations

import torch
from torch import Tensor


def home_of_float64(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(x: Tensor) -> Tensor:
    return x.to(home_of_float64(x.device)).double()
