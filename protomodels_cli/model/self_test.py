"""One training step of a tiny model on a device, against the same step on the CPU in float64: does the device compute
what it should?

Two stages, so that everything a peer does is in it: blocks, the subspace, messages, the loss, the gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.codecs.crossing import Carrier
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.data.shards import TokenStream
from protomodels_cli.model.reference import Reference
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec

Dtype = Literal["float32", "bf16"]
# Of all gradients together, by which they may be off the CPU's. What was seen of good devices: 1e-6 and 0.01.
TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bf16": 0.1}
TOKENS = 4096


@dataclass(frozen=True)
class Compared:
    """Shares: of the loss, and of the length of the vector of all gradients."""

    dtype: Dtype
    loss_off: float
    gradients_off: float

    @property
    def off(self) -> float:
        return math.inf if math.isnan(self.loss_off + self.gradients_off) else max(self.loss_off, self.gradients_off)

    @property
    def is_right(self) -> bool:
        return self.off <= TOLERANCE[self.dtype]


class _Drawn(TokenStream):
    """Tokens that are the same everywhere, without files."""

    def __init__(self) -> None:
        super().__init__([], Path())
        self._ids = np.array([counter.word(1, i) % 256 for i in range(TOKENS)], dtype=np.int64)

    def __len__(self) -> int:
        return TOKENS

    def read(self, start: int, count: int) -> np.ndarray:
        return self._ids[start : start + count]


def _spec(dtype: str) -> RunSpec:
    fields: dict[str, Any] = {
        "steps": 1,
        "stages": 2,
        "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "context": 32, "segments": 2},
        "subspace": {"form": "two_stream", "k": 8},
        "batch": {"size": 4, "microbatches": 2},
        "tokenizer": {"kind": "bytes"},
        "data": {"max_bytes": 100_000},
        "wire": {"forward": "fp32", "backward": "fp32"},
        "compute": {"dtype": dtype, "compile": "never"},
    }
    return spec_from(fields)


def _step(dtype: str, device: torch.device) -> tuple[float, Tensor]:
    spec, stream = _spec(dtype), _Drawn()
    reference = Reference(spec, Corpus(stream, stream, {}, Path()), Carrier(spec), device)
    loss = reference.accumulate(1)
    gradients = [p.grad for stage in reference.stages for p in stage.parameters() if p.grad is not None]
    return loss, torch.cat([g.detach().cpu().double().flatten() for g in gradients])


def compare(device: torch.device, *dtypes: Dtype) -> list[Compared]:
    """Raises what torch raises where the device lacks an operator."""
    loss, gradients = _step("float64", torch.device("cpu"))
    found = []
    for dtype in dtypes:
        here, theirs = _step(dtype, device)
        off = float((theirs - gradients).norm() / gradients.norm())
        found.append(Compared(dtype, abs(here - loss) / abs(loss), off))
    return found
