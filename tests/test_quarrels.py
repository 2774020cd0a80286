"""Who is dismissed when peers blame each other for what crossed their boundary: tables of complaints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_spec
from machine_bench import SILENT, Bench, to_step

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.assigning import DISMISS_AFTER, culprits_of
from protomodels_cli.coordinator.audit_reasons import MessagesDiffer
from protomodels_cli.coordinator.history import Placed
from protomodels_cli.coordinator.reasons import PeerReport
from protomodels_cli.wire.troubles import InvalidInput, LinkBroken


def after(*pairs: str) -> dict[frozenset[str], int]:
    found: dict[frozenset[str], int] = {}
    for pair in pairs:
        found[frozenset(pair)] = found.get(frozenset(pair), 0) + 1
    return found


@pytest.mark.parametrize(
    ("complaints", "last", "dismissed"),
    [
        (["ab"], "ab", ""),  # once may be a bit that fell over
        (["ab"] * 5, "ab", ""),  # one peer's word against another's
        (["ab"] * DISMISS_AFTER, "ab", "ab"),  # … which has to end
        (["ab", "ab", "bc"], "bc", ""),
        (["ab", "ab", "bc", "bc"], "bc", "b"),  # whoever is in between
        (["ab", "ab", "bc", "cb"], "cb", "b"),  # whoever complains
        (["ab", "ab", "cd", "cd"], "cd", ""),  # two of them that have nothing in common
        (["aa"] * 9, "aa", "a"),  # a peer that blames itself
    ],
)
def test_who_is_in_all_of_them(complaints, last, dismissed):
    assert "".join(culprits_of(after(*complaints), *last)) == dismissed


def complain(b: Bench, stage: int, about: int, what=InvalidInput) -> list[str]:
    """Who is dismissed when the holder of a stage says this of another, in the middle of a step."""
    while b.state.task is None or b.state.task.kind != "step":
        b.answer()
    before, peer = set(b.state.peers), b.state.history.holders[stage]
    reason = MessagesDiffer(3, min(stage, about)) if what is MessagesDiffer else PeerReport(what(about, "bad"))
    b.tell(ev.Trouble(peer, reason, about, b.state.history.generation))
    return sorted(before - set(b.state.peers))


@pytest.mark.parametrize("what", [InvalidInput, MessagesDiffer])
def test_a_peer_that_behaves_in_between_is_found_all_the_same(what):
    b = Bench(make_spec(stages=3, steps=30))
    b.join(0, 1, 2, 3, 4)
    suspect = b.state.history.holders[1]
    found = []
    for stage in (0, 2, 0, 2):
        found.append(complain(b, stage, 1, what))
        if not found[-1]:
            while b.state.task is None or b.state.task.kind != "step":
                b.answer()
            b.answer()  # a step is decided: links that break in a row are forgotten
    assert found == [[], [], [], [suspect]]


def test_broken_links_are_nobodys_fault():
    b = Bench(make_spec(stages=3, steps=30))
    b.join(0, 1, 2)
    for stage in (0, 2) * 4:
        assert complain(b, stage, 1, LinkBroken) == []
        while b.state.task is None or b.state.task.kind != "step":
            b.answer()
        b.answer()
    assert b.state.quarrels == {}


def quarrel(times: int) -> Bench:
    """The holders of stages 0 and 1 have quarrelled so often, and stage 0's is away."""
    b = Bench(make_spec(stages=3, steps=30))
    b.join(0, 1, 2, 3, 4)
    to_step(b, 3)
    for _ in range(times):
        assert complain(b, 0, 1, MessagesDiffer) == []
        while b.state.task is None or b.state.task.kind != "step":
            b.answer()
        b.answer()
    b.tell(ev.Left(b.state.history.holders[0], SILENT))
    assert list(b.state.absent) == [b.state.history.holders[0]]
    return b


def test_two_culprits_one_of_whom_is_away_open_one_generation():
    b = quarrel(DISMISS_AFTER - 1)
    before, told_before = b.state.history, len(b.records)
    away, here, *_ = before.holders
    commands = b.tell(ev.Trouble(away, MessagesDiffer(3, 0), 1, before.generation))
    assert {c.peer for c in commands if isinstance(c, ev.Dismiss)} == {away, here}
    assert [r.generation for r in b.records[told_before:] if isinstance(r, Placed)] == [before.generation + 1]
    assert len([c for c in commands if isinstance(c, ev.AssignStage)]) == b.state.stages
    assert not {away, here} & {*b.state.peers, *b.state.absent, *b.state.history.holders}


def test_a_complaint_of_a_holder_that_is_away_counts_and_relinks_nobody():
    """Witnesses of a step are compared when the last of them is heard, and one may be away by then."""
    b = quarrel(1)
    before = b.state
    away, here, *_ = before.history.holders
    assert b.tell(ev.Trouble(away, MessagesDiffer(3, 0), 1, before.history.generation)) == []
    assert b.state == replace(before, quarrels={frozenset((away, here)): 2})
