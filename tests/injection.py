"""Faults, put in from outside: the code under test has no switch for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_points import fail_at
from faults_in_place import (
    cannot_build,
    claims_parts,
    false_claim,
    false_verdicts,
    files_in_the_loop,
    flip_bit,
    full_disk_once,
    impatient,
    little_memory,
    never_ready,
    no_record,
    other_basis,
    other_defaults,
    other_protocol,
    other_table,
    reseats_nobody,
    saves_nonsense,
    slow,
    slow_disk,
    spoils_its_part,
    stuck_device,
    withholds_its_part,
    wrong_clock,
)
from faults_in_transit import (
    cut_link,
    damage_bytes,
    feed_out_of_order,
    inflate,
    lose_message,
    lose_turn,
    lose_way,
    perturb,
    poison,
    two_faced,
    unreachable,
)
from marks import mark_in

FAULTS = {
    f.__name__: f
    for f in (
        flip_bit,
        poison,
        perturb,
        inflate,
        two_faced,
        other_protocol,
        other_table,
        other_basis,
        other_defaults,
        never_ready,
        no_record,
        wrong_clock,
        little_memory,
        unreachable,
        full_disk_once,
        cannot_build,
        claims_parts,
        false_claim,
        false_verdicts,
        files_in_the_loop,
        spoils_its_part,
        saves_nonsense,
        withholds_its_part,
        slow_disk,
        slow,
        stuck_device,
        lose_message,
        feed_out_of_order,
        impatient,
        reseats_nobody,
        fail_at,
        lose_turn,
        damage_bytes,
        cut_link,
        lose_way,
    )
}


@contextmanager
def fault(marks: Path, kind: str = "", **options: Any) -> Iterator[None]:
    """Something wrong with this process, for as long as this lasts. When it happens, it leaves a mark there."""
    if not kind:
        yield
        return
    import pytest

    mark_in(marks, kind)
    try:
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[kind](patch, **options)
            yield
    finally:
        mark_in(None)
