"""How fast a run is, and how long the rest takes: one rule for the coordinator, peers and the reference. Pure.

The speed is that of the last steps, with evaluations and the like between them. Callers begin anew after a pause, a
wait or a change of holders: how long that took says nothing about the steps to come.
"""

from __future__ import annotations

from collections.abc import Sequence

KEPT = 50  # moments


def with_step(moments: tuple[float, ...], began: float, decided: float) -> tuple[float, ...]:
    """`moments`: when the last steps were decided, after the moment at which the first of them began."""
    return (*(moments or (began,)), decided)[-KEPT:]


def tokens_per_s(moments: Sequence[float], tokens: int) -> float:
    """`tokens`: of a step. 0: not known."""
    if len(moments) < 2 or moments[-1] <= moments[0]:
        return 0.0
    return tokens * (len(moments) - 1) / (moments[-1] - moments[0])


def seconds_left(steps: int, tokens: int, speed: float) -> float | None:
    """For so many steps, at so many tokens a second; None: not known."""
    return steps * tokens / speed if speed > 0 else None
