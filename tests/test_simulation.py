"""The simulation finds nothing wrong with the machine, and finds what is wrong with machines that are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import simulated_rules
from simulated_coordinator import CoordinatorProcess
from simulated_words import Violation
from simulated_world import World
from simulation import simulate
from tiers import first

from protomodels_cli.coordinator import (
    absences,
    assigning,
    checking,
    contradictions,
    machine,
    outgoing,
    patience,
    reseating,
)
from protomodels_cli.coordinator.history import RECORDS, Placed, RolledBack
from protomodels_cli.coordinator.snapshots import policy

SEEDS, BLOCK = range(30, 90), 20  # beside those of test_it_is_eventful; scripts/simulate.sh tries as many as you like

RESEATING = (147, 211, 243, 251, 299)  # seeds


def tried(seed: int) -> World:
    """What came of it; if it breaks a rule, the test's end, with all that happened."""
    try:
        return simulate(seed)
    except Violation as e:
        log: list[str] = []
        with pytest.raises(Violation):
            simulate(seed, log)
        raise AssertionError(f"seed {seed}: {e}\n" + "\n".join(log)) from None


@pytest.mark.parametrize("start", first(1, SEEDS[::BLOCK]))
def test_no_seed_breaks_a_rule(start):
    for seed in range(start, start + BLOCK):
        tried(seed)


def test_a_seed_is_the_same_story_every_time():
    stories = []
    for _ in range(2):
        log: list[str] = []
        simulate(11, log)
        stories.append(log)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 20


@pytest.mark.full
def test_it_is_eventful():
    """No seed here breaks a rule either, and all that can be written happens: otherwise they would prove little."""
    kinds: set[str] = set()
    redone = went_back = 0
    for seed in range(SEEDS.start):
        world = tried(seed)
        assert world.coordinator is not None
        history = world.coordinator.state.history
        kinds |= {type(record).__name__ for record in world.disk.journal}
        redone, went_back = redone + history.redone, went_back + history.lineage - 1
    assert kinds == set(RECORDS)
    assert redone > 40
    assert went_back > 20


def test_where_some_are_slow_stages_change_hands_or_stay_where_they_are():
    worlds = [tried(seed) for seed in RESEATING]
    assert sum(world.reseated for world in worlds) > 5
    assert sum(world.kept for world in worlds) > 2


@pytest.mark.parametrize("start", first(1, range(0, 60, 6)))
def test_liars_are_found_and_nobody_else(start: int):
    """Three of nine peers lie, in what they send and in audits, and come back with other ids."""
    lied = found = 0
    for seed in range(start, start + 6):
        world = World(seed, peers=9, audited=True)
        world.live(12)
        lied, found = lied + len(world.liars), found + len(world.found)
    assert found >= 2, f"of {lied}; one that never holds a stage nor audits is not found"


def test_a_thousand_peers():
    world = World(5, peers=1000)
    world.live(6)


# Machines with a fault in them. Each must be found out, by the rule that is there for it.


def believes_anyone(patch: Any) -> None:
    """What a peer has in memory counts whatever it is."""
    patch.setattr(assigning, "is_current", lambda history, holding: holding is not None)


def takes_any_generation(patch: Any) -> None:
    """Reports count whichever generation they are of."""
    take = machine._take

    def any_of(moves: Any, event: Any) -> None:
        if hasattr(event, "generation"):
            event = replace(event, generation=moves.state.history.generation)
        if hasattr(event, "task") and moves.state.task is not None:
            event = replace(event, task=moves.state.task.number)
        take(moves, event)

    patch.setattr(machine, "_take", any_of)


def goes_back_too_far(patch: Any) -> None:
    """… to the beginning, always."""
    back = assigning.roll_back
    patch.setattr(assigning, "roll_back", lambda moves, mark, why: back(moves, moves.state.history.snapshots[0], why))


def keeps_the_generation(patch: Any) -> None:
    """New holders, old number."""
    record = assigning.Moves.record

    def same(self: Any, entry: Any) -> None:
        if isinstance(entry, Placed):
            entry = replace(entry, generation=max(1, entry.generation - 1))
        record(self, entry)

    patch.setattr(assigning.Moves, "record", same)


def keeps_the_lineage(patch: Any) -> None:
    """Goes back without opening a new one."""
    record = assigning.Moves.record

    def same(self: Any, entry: Any) -> None:
        if isinstance(entry, RolledBack):
            entry = replace(entry, lineage=entry.lineage - 1)
        record(self, entry)

    patch.setattr(assigning.Moves, "record", same)


def saves_too_soon(patch: Any) -> None:
    """A snapshot counts before the subspace of its step is settled."""
    patch.setattr(policy, "complete", lambda moves: _complete_at_once(moves))


def _complete_at_once(moves: Any) -> None:
    for step, parts in sorted(moves.state.saving.whole.items()):
        moves.record(policy.Saved(step, parts))
        moves.saving = replace(moves.saving, whole={s: p for s, p in moves.state.saving.whole.items() if s > step})
        moves.do(outgoing.keep(moves.state))


def never_gives_up_waiting(patch: Any) -> None:
    patch.setattr(absences, "weigh", lambda moves: None)


def believes_in_every_task(patch: Any) -> None:
    """A step that stands still is waited for."""
    patch.setattr(patience, "patience", lambda state, kind: math.inf)


def believes_in_every_word(patch: Any) -> None:
    """What a stage owes beside its tasks is waited for."""
    patch.setattr(patience, "_watch_subspace", lambda moves: None)


def does_not_check(patch: Any) -> None:
    """Other bytes of U go unnoticed."""
    patch.setattr(checking, "check_hashes", lambda moves, task, stage, report: True)


def says_nothing(patch: Any) -> None:
    """It waits without a word."""
    patch.setattr(simulated_rules, "waiting_for", lambda state, now: state.missing if state.placed else None)


def speaks_before_it_writes(patch: Any) -> None:
    """Commands leave before the journal has what they follow from."""
    take = CoordinatorProcess.take

    def hasty(self: Any, event: Any) -> None:
        kept = list(self.disk.journal)
        take(self, event)
        if self.world.coordinator is None:  # it died just now: the disk had not got that far
            self.disk.journal[:] = kept

    def before_the_words(self: World, moment: str) -> bool:
        return False if moment == "before the journal" else dies(self, moment)

    dies = World.dies_at
    do = CoordinatorProcess._do

    def and_die(self: Any, command: Any) -> None:
        do(self, command)
        if self.alive and self.world.random.random() < self.world.death:
            self.world.coordinator_dies()

    patch.setattr(CoordinatorProcess, "take", hasty)
    patch.setattr(CoordinatorProcess, "_do", and_die)
    patch.setattr(World, "dies_at", before_the_words)


def reseats_from_any_snapshot(patch: Any) -> None:
    """The newest, though steps were decided since."""
    watch = reseating.watch

    def at_once(moves: Any) -> None:
        if moves.state.seats.handover is not None and moves.state.history.newest.parts:
            late = replace(moves.seats.handover, snapshot=moves.state.history.newest.key)
            moves.seats = moves.seats.handing_over(late.why.stage, late)
        watch(moves)

    patch.setattr(reseating, "watch", at_once)


def believes_in_every_reseating(patch: Any) -> None:
    """A spare that does not get ready is waited for."""
    patch.setattr(reseating, "watch", lambda moves: None)


def forgets_what_it_measured(patch: Any) -> None:
    """A benchmark counts again as soon as a peer is a spare."""
    end = assigning._end_generation

    def and_forget(moves: Any) -> None:
        end(moves)
        moves.conduct = replace(moves.conduct, speeds={})

    patch.setattr(assigning, "_end_generation", and_forget)


def believes_one_auditor(patch: Any) -> None:
    """The word of one is enough."""
    patch.setattr(contradictions, "quorum", lambda voices: 1)


# With the first seed to try: what is rare is looked for where it was last seen, and then everywhere.
BROKEN: list[tuple[Callable[[Any], None], str, int]] = [
    (believes_anyone, "keeps|was told|was granted|not those of a run", 26),
    (takes_any_generation, "was told|was granted|not those of a run|twice|beyond|reuse what it does not have", 100),
    (goes_back_too_far, "past the snapshot", 0),
    (keeps_the_generation, "opened twice|both hold", 0),
    (keeps_the_lineage, "lineage|twice", 0),
    (saves_too_soon, "still waits|not those of a run", 128),
    (never_gives_up_waiting, "still waits for", 0),
    (believes_in_every_task, "still waits for (StagesWorking.task=.step|SubspaceReport|BasisNotTaken)", 0),
    (believes_in_every_word, "still waits for (SubspaceReport|BasisNotTaken)", 0),
    (does_not_check, "not those of a run", 0),
    (says_nothing, "does not say for what", 0),
    (reseats_from_any_snapshot, "as it was at|was granted|was told|not those of a run", 3),
    (believes_one_auditor, "which is honest, was dismissed", 2),
    (believes_in_every_reseating, "still waits for Reseating", 3),
    (forgets_what_it_measured, "known to be slower", 579),
    (speaks_before_it_writes, "beyond|not decided|keeps|was told|twice|both hold", 0),
]


@pytest.mark.parametrize(
    ("breaks", "words", "begin"), first(5, [pytest.param(*row, id=row[0].__name__) for row in BROKEN])
)
def test_a_broken_machine_is_found_out(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[Any], None], words: str, begin: int
):
    breaks(monkeypatch)

    def try_all() -> None:
        for seed in range(600):
            simulate((begin + seed) % 600)

    with pytest.raises((Violation, AssertionError), match=words):
        try_all()
