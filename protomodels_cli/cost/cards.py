"""How a stage's layers are laid over a peer's cards, in order, and what that costs. Pure.

The layers on a card are weighed as if they were a stage: that counts messages, and what codecs remember, between cards
too. There are no codecs there, so it is a little more than is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from protomodels_cli.cost.activations import Computation
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.spec.cut import layers_per_stage


def laid_over(
    sizes: StageMemory, layers: range, stages_after: int, computation: Computation | None, rooms: Sequence[int]
) -> list[range]:
    """The layers on each card, so that the fullest card is as little full as can be; none on a card that is not needed
    for that."""

    @cache
    def fullest(first: int, card: int) -> tuple[float, tuple[int, ...]]:
        """With the layers from `first` on over the cards from `card` on: how full, and where each card's layers end,
        negative, so that of equals the one with most on the first cards is the least."""
        if card == len(rooms) - 1:
            return full(first, layers.stop, card), (-layers.stop,)
        return min(
            (max(full(first, end, card), after), (-end, *ends))
            for end in range(first, layers.stop + 1)
            for after, ends in [fullest(end, card + 1)]
        )

    @cache
    def need(first: int, end: int) -> int:
        return sizes.total(first, end, stages_after, computation) if end > first else 0

    def full(first: int, end: int, card: int) -> float:
        return need(first, end) / max(1, rooms[card])

    ends = [-end for end in fullest(layers.start, 0)[1]]
    return [range(first, end) for first, end in zip([layers.start, *ends], ends, strict=False)]


def offered(sizes: StageMemory, computation: Computation | None, rooms: Sequence[int]) -> int:
    """Bytes of which a peer can say that any stage of that size fits on its cards: a card may be left with almost a
    layer's room, and has for itself what a stage has once. (The embedding or the head may leave more than a layer.)"""
    if len(rooms) == 1:
        return rooms[0]
    spec = sizes.spec
    stages = spec.model.layers if spec.stages == "auto" else len(layers_per_stage(spec))
    middle = range(1, spec.model.layers - 1) or range(spec.model.layers)
    seam = max(sizes.total(i, i + 1, stages - 1, computation) for i in middle)
    return max(max(rooms), sum(rooms) - (len(rooms) - 1) * seam)
