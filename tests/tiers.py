"""The tiers of the tests, and the rows of large tables that the default tier runs.

The default tier runs with every change, so it must stay under ten minutes on two cores. `--all` adds the tests marked
`full`: long ones, and all rows of all tables. CONTRIBUTING.md says what belongs where.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

# Seconds that one test of a tier may take on a busy machine. A longer one is named at the end of the run.
LONGEST = {"default": 20.0, "all": 120.0}


def first(count: int, rows: Iterable[Any]) -> list[Any]:
    """All rows, where the default tier runs the first `count`."""
    found = []
    for i, row in enumerate(rows):
        values = row.values if isinstance(row, ParameterSet) else row if isinstance(row, tuple) else (row,)
        name = row.id if isinstance(row, ParameterSet) else None
        found.append(pytest.param(*values, id=name, marks=[] if i < count else pytest.mark.full))
    return found


def table(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All rows, where the default tier runs a few that have every value of every column between them."""
    order = random.Random(len(rows)).sample(range(len(rows)), len(rows))
    seen: set[tuple[int, str]] = set()
    in_default = set()
    for i in order:
        values = {(column, repr(value)) for column, value in enumerate(rows[i])}
        if values - seen:
            in_default.add(i)
            seen |= values
    return [pytest.param(*row, marks=[] if i in in_default else pytest.mark.full) for i, row in enumerate(rows)]
