"""What an audit compares with: how far honest machines may be apart, and how often one looks. No tensors, no peers.

A stage's message is a lie where more of its numbers than `MOST_WILD` lie outside everything that the recomputed numbers
become when they are moved by as much as honest arithmetic moves them. docs/audit.md has the measurements.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from protomodels_cli.protocol.messages import Leg

# How far two honest machines' numbers are apart before they are encoded, of a token's root mean square: by what the
# less exact of them multiplies in. Several times what was measured.
NOISE = {"float64": 1e-9, "float32": 1e-4, "tf32": 0.004, "bf16": 0.01}
MOST_WILD = 1e-3  # of the numbers that travelled
LEAST_WILD = 3  # numbers: fewer than these in a small message prove nothing


@dataclass(frozen=True)
class Compared:
    """A message that a stage sent beside the one that it should have sent."""

    leg: Leg
    numbers: int  # that travelled
    wild: int  # those outside what honest arithmetic explains

    @property
    def limit(self) -> float:
        """Wild numbers that make a lie of a message."""
        return max(LEAST_WILD, MOST_WILD * self.numbers)

    @property
    def is_lie(self) -> bool:
        return self.wild >= self.limit


@dataclass(frozen=True)
class Recorded:
    """What a stage says of the messages of a step: a hash for each microbatch."""

    step: int
    forward_in: tuple[bytes, ...] = ()
    forward_out: tuple[bytes, ...] = ()
    backward_in: tuple[bytes, ...] = ()
    backward_out: tuple[bytes, ...] = ()


def disputed(stages: Sequence[Recorded]) -> list[int]:
    """Boundaries whose two ends do not say the same of what crossed them: one of them lies."""
    pairs = itertools.pairwise(stages)
    return [
        boundary
        for boundary, (before, behind) in enumerate(pairs)
        if (before.forward_out, before.backward_in) != (behind.forward_in, behind.backward_out)
    ]


def noise_between(one: str, other: str) -> float:
    """Of two machines that multiply in these types; one that is not known counts as the coarsest."""
    return max(NOISE.get(name, max(NOISE.values())) for name in (one, other))


def drawn(share: float, steps: int, stages: int, draw: random.Random) -> list[int]:
    """Stages to be audited, in the step after a snapshot, of which there is one in so many steps: each with the
    probability that makes it `share` of all stage-steps, or always, where that is not enough."""
    return [stage for stage in range(stages) if draw.random() < share * steps]


def chance(share: float, interval: int, steps: int) -> float:
    """The probability that a stage is audited within so many steps, with a snapshot every `interval` of them."""
    return 1 - (1 - min(1.0, share * interval)) ** (steps // interval)


def digest(leg: str, step: int, microbatch: int, version: int, ids: bytes, payload: bytes | memoryview | None) -> bytes:
    """Of a message, as both ends of a boundary compute it."""
    poison = payload is None
    found = hashlib.sha256(f"{leg} {step} {microbatch} {version} {len(ids)} {poison} ".encode())
    found.update(ids)
    found.update(b"" if payload is None else payload)
    return found.digest()
