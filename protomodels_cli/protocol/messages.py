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


class OutOfOrder(BadMessage):
    """Another message is next."""

    def __init__(self, leg: Leg, got: tuple[int, int], expected: tuple[int, int]):
        self.leg, self.got, self.expected = leg, got, expected  # step and microbatch
        words = [f"microbatch {microbatch} of step {step}" for step, microbatch in (got, expected)]
        super().__init__(
            f"the {leg} message of {words[0]} arrived where that of {words[1]} was expected", "out_of_order"
        )


class CreditExceeded(BadMessage):
    """The sender did not wait for credit."""

    def __init__(self, window: int):
        self.window = window
        super().__init__(f"more than {window} messages without credit", "credit_exceeded")


class CreditNotDue(BadMessage):
    """The receiver says that it has taken more than it was sent."""

    def __init__(self, taken: int, sent: int):
        self.taken, self.sent = taken, sent
        super().__init__(f"credit for {taken} messages where {sent} were sent", "credit_not_due")
