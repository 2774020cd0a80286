"""Whether to wait for a holder that fell silent, or to go on without it. Pure.

Waiting costs the time that it is away; going on costs what a rollback computes again. Nobody knows how long it will be
away, so we wait until waiting has cost as much as going on would: then the two together cost at most twice what the
better choice would have, whatever happens. Meanwhile somebody else fetches the stage's part and builds the stage, so
that going on begins with neither, and cannot fail there. A holder that has come back from as long an absence before is
given the time of a fetch on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEASES = 2  # without a word: the least that a holder is given, also where a rollback costs nothing
FETCH_AFTER = 20.0  # seconds without a word, at most, until somebody prepares to take over: most absences are shorter
COMES_BACK = 2.0  # an absence is like earlier ones until it is so many times as long as the longest

Action = Literal["wait", "fetch", "replace"]


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    redo: float  # computing again what the newest snapshot does not have, and what is done of the step under way
    fetch: float  # until somebody else has fetched the stage's part and built the stage


def patience(costs: Costs, away: float, longest: float, lease: float) -> float:
    """Seconds without a word from a holder after which the run goes on without it. `longest`: its longest absence so
    far that it came back from."""
    comes_back = longest > 0 and away <= COMES_BACK * longest
    return max(LEASES * lease, costs.redo + (costs.fetch if comes_back else 0.0))


def decide(costs: Costs, away: float, longest: float, lease: float, ready: bool) -> Action:
    """`ready`: whoever is to take over has built the stage."""
    limit = patience(costs, away, longest, lease)
    if ready:
        return "replace" if away >= limit else "wait"
    return "fetch" if away >= min(FETCH_AFTER, limit / 4) else "wait"
