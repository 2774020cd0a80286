"""Whether operators can be compiled for a device: tried once, and remembered for as long as the process lives.

Where nobody has tried, they count as compiled: the first stage then finds out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protomodels_cli.errors import first_line

_problems: dict[tuple[str, int], str | None] = {}


def is_known_to_fail(device: torch.device) -> bool:
    return _problems.get(_key(device)) is not None


def problem_of(device: torch.device) -> str | None:
    """Why operators cannot be compiled for this device, if so. The first answer takes seconds."""
    if (key := _key(device)) not in _problems:
        try:
            torch.compile(_small, fullgraph=True, dynamic=False)(torch.zeros(2, 8, device=device))
            _problems[key] = None
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            _problems[key] = first_line(error)
    return _problems[key]


def _key(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0  # `cuda` is `cuda:0`


def _small(x: Tensor) -> Tensor:
    """Of no stage: torch compiles a function for so many shapes and no more."""
    return F.silu(x) * x
