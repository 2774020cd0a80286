"""Which cases of a large table are run: with PMTRAIN_ALL_CASES=1 all of them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any


def some(cases: Sequence[tuple[Any, ...]], share: int = 2) -> list[tuple[Any, ...]]:
    """One of `share`, the same ones every time; whatever value a case has in its place, one of them has it there."""
    if os.environ.get("PMTRAIN_ALL_CASES"):
        return list(cases)
    order = random.Random(len(cases)).sample(range(len(cases)), len(cases))
    chosen, seen = [], set()
    for i in order:
        values = {(place, repr(value)) for place, value in enumerate(cases[i])}
        if len(chosen) < len(cases) // share or values - seen:
            chosen.append(i)
            seen |= values
    return [cases[i] for i in sorted(chosen)]
