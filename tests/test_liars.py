"""Whatever peers say and do, the state machine raises no exception, and keeps to the table of states at its head."""

from __future__ import annotations

import pytest
from conftest import make_spec
from liars import Liars
from table_of_states import Table
from tiers import first

SPECS = {
    "moving": {"subspace": {"sync_interval": 4, "update": {"interval": 4, "window": 2, "delay": 1}}},
    "dense": {"subspace": {"form": "dense"}},
    "saving": {"snapshots": {"interval": 1}, "audit": 0.5},
}
EVENTS, SEEDS, BLOCK = 500, range(400), 10


@pytest.mark.parametrize("start", first(2, SEEDS[::BLOCK]))
def test_no_message_of_a_liar_raises_or_leads_to_a_state_that_cannot_be(start):
    for seed in range(start, start + BLOCK):
        sections = list(SPECS.values())[seed % len(SPECS)]
        spec = make_spec(stages=2 + seed % 3, steps=60, limits={"lease_seconds": 2.0}, **sections)
        world = Liars(seed, spec, honest=3, liars=3)
        try:
            with Table().watching():
                world.live(EVENTS)
        except Exception as e:
            e.add_note(f"seed {seed}, event {world.events}")
            raise
