"""What a block does between its products of matrices, as pure functions: each becomes one kernel when compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normed(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm over the last dimension in the gain's precision, as `dtype`."""
    return F.rms_norm(x.to(gain.dtype), gain.shape, gain, eps).to(dtype)


def rotated(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2), the pairing Hugging Face's checkpoints use."""
    a, b = x_BHTE.chunk(2, dim=-1)
    return torch.cat((a * cos_TE - b * sin_TE, b * cos_TE + a * sin_TE), dim=-1).to(x_BHTE.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def signed_rows(packed: Tensor, width: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows of ±scale from rows of bits, eight to a byte, the lowest first."""
    bit = torch.arange(8, dtype=torch.uint8, device=packed.device)
    signs = ((packed.unsqueeze(-1) >> bit) & 1).flatten(-2)[..., :width].to(dtype)
    return signs * (2 * scale) - scale


def losses_and_gradient(logits: Tensor, targets: Tensor, scale: Tensor, precise: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tokens' cross-entropies, and the gradient of scale × their sum with respect to the logits."""
    log_p = F.log_softmax(logits, -1, dtype=precise)
    picked = log_p.gather(1, targets.unsqueeze(1))
    p = log_p.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    return -picked.squeeze(1), ((p - is_target.to(precise)) * scale).to(logits.dtype)


@dataclass(frozen=True)
class Operators:
    normed: Callable[..., Tensor] = normed
    rotated: Callable[..., Tensor] = rotated
    gated: Callable[..., Tensor] = gated
    signed_rows: Callable[..., Tensor] = signed_rows
    losses_and_gradient: Callable[..., tuple[Tensor, Tensor]] = losses_and_gradient


EAGER = Operators()


@cache
def compiled() -> Operators:
    """The same functions, compiled at their first call for each shape: one set for all stages of a process."""

    def one(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False)

    return Operators(one(normed), one(rotated), one(gated), one(signed_rows), one(losses_and_gradient))
