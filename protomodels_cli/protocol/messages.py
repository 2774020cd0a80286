"""Which message crosses which boundary, and what is said of one that cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Leg = Literal["forward", "backward", "evaluation"]
LEGS: tuple[Leg, ...] = ("forward", "backward", "evaluation")


@dataclass(frozen=True)
class MessageKey:
    """Which message this is: all that a codec's random numbers may depend on, beside the seed."""

    step: int
    microbatch: int
    boundary: int  # i lies between stages i and i + 1
    leg: Leg


class BadMessage(ValueError):
    """A neighbour sent a message that no correct peer sends. `kind` names the fault to programs; `leg` says on which
    leg, where whoever finds the fault cannot know."""

    leg: Leg | None = None

    def __init__(self, what: str, kind: str = ""):
        super().__init__(what)
        self.kind = kind
