"""What happens to the peers of a month: who joins, blinks and dies, and when. Drawn from a seed before the run begins,
so that every policy meets the same month."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

HOUR, DAY = 3600.0, 86_400.0
ONE_IN_TEN = 1.2815515655446004  # standard deviations above the median


@dataclass(frozen=True)
class Rates:
    """Of each peer; gaps are exponential, durations lognormal. Seconds."""

    blip_every: float = 12 * HOUR
    blip_median: float = 20.0
    blip_tenth: float = 600.0  # one in ten is longer
    loss_every: float = 5 * DAY
    closed: float = 0.5  # share of losses where its kernel closes the connection; else silence for ever
    join_after: float = HOUR  # a loss, a new peer

    def times(self, factor: float) -> Rates:
        return Rates(
            self.blip_every / factor,
            self.blip_median,
            self.blip_tenth,
            self.loss_every / factor,
            self.closed,
            self.join_after,
        )


@dataclass(frozen=True)
class Home:
    """One peer's life."""

    name: str
    joins: float
    blips: tuple[tuple[float, float], ...]  # when, and for how long
    dies: float  # infinite: after the end
    closed: bool  # its kernel closes the connection then


def homes(seed: int, peers: int, seconds: float, rates: Rates) -> Iterator[Home]:
    """Those who are there from the beginning, and those who come for each that is lost."""
    sigma = math.log(rates.blip_tenth / rates.blip_median) / ONE_IN_TEN
    for seat in range(peers):
        draw, joins, number = random.Random(f"{seed} {seat}"), 0.0, 0
        while joins < seconds:
            dies = joins + draw.expovariate(1 / rates.loss_every)
            blips, at = [], joins + draw.expovariate(1 / rates.blip_every)
            while at < min(dies, seconds):
                lasts = min(draw.lognormvariate(math.log(rates.blip_median), sigma), dies - at)
                blips.append((at, lasts))
                at += lasts + draw.expovariate(1 / rates.blip_every)
            closed = draw.random() < rates.closed
            yield Home(f"p{seat}.{number}", joins, tuple(blips), dies if dies < seconds else math.inf, closed)
            joins, number = dies + rates.join_after, number + 1
