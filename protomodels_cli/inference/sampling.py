"""Which token comes next, from logits: pure, apart from the generator that it is handed."""

from __future__ import annotations

import torch
from torch import Tensor


def next_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Drawn from the nucleus; with temperature 0, the likeliest. The generator is the CPU's on every device, so that
    one seed means one text."""
    if temperature == 0:
        return int(logits_V.argmax())
    ids, cumulative = nucleus(probabilities(logits_V, temperature), top_p)
    drawn = torch.rand((), dtype=torch.float64, generator=generator).to(cumulative.device) * cumulative[-1]
    place = torch.searchsorted(cumulative, drawn, right=True).clamp(max=len(ids) - 1)
    return int(ids[place])


def probabilities(logits_V: Tensor, temperature: float) -> Tensor:
    """In float64, and from differences to the largest: a temperature close to 0 does not overflow."""
    logits = logits_V.double()
    return torch.softmax((logits - logits.max()) / temperature, dim=-1)


def nucleus(probabilities_V: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of tokens that has at least the share top_p, likeliest first, and their cumulative share."""
    sorted_V, ids_V = probabilities_V.sort(descending=True, stable=True)
    cumulative = sorted_V.cumsum(-1)
    if top_p >= 1:  # which rounding may keep the sum from reaching, or let it reach too early
        return ids_V, cumulative
    kept = int((cumulative < top_p).sum()) + 1
    return ids_V[:kept], cumulative[:kept]
