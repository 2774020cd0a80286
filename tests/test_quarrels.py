"""Who is dismissed when peers blame each other for what crossed their boundary: tables of complaints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_spec
from machine_bench import SILENT, Bench, peer, to_step, told

from protomodels_cli import timeouts
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.assigning import DISMISS_AFTER
from protomodels_cli.coordinator.audit_reasons import MessagesDiffer
from protomodels_cli.coordinator.disputes import APART, MOST_COMPLAINTS, culprits_of
from protomodels_cli.coordinator.history import Placed
from protomodels_cli.coordinator.reasons import PeerReport
from protomodels_cli.wire.troubles import InvalidInput, LinkBroken


def after(*pairs: str) -> dict[frozenset[str], int]:
    found: dict[frozenset[str], int] = {}
    for pair in pairs:
        found[frozenset(pair)] = found.get(frozenset(pair), 0) + 1
    return found


ONE_PERSON = dict.fromkeys("abcde", "x")
EACH_OF_ANOTHER = dict(zip("abcde", "vwxyz", strict=True))
TWO_OF_ONE = {**EACH_OF_ANOTHER, "a": "x", "c": "x"}


@pytest.mark.parametrize(
    ("complaints", "last", "tokens", "dismissed"),
    [
        (["ab"], "ab", ONE_PERSON, ""),  # once may be a bit that fell over
        (["ab"] * 5, "ab", ONE_PERSON, ""),  # one peer's word against another's
        (["ab"] * DISMISS_AFTER, "ab", ONE_PERSON, "ab"),  # … which has to end
        (["ab"] * 50, "ab", EACH_OF_ANOTHER, ""),  # one person's word against another's
        (["ab", "ab", "bc"], "bc", EACH_OF_ANOTHER, ""),
        (["ab", "ab", "bc", "bc"], "bc", EACH_OF_ANOTHER, "b"),  # whoever is in between
        (["ab", "ab", "bc", "cb"], "cb", EACH_OF_ANOTHER, "b"),  # whoever complains
        (["ab", "ab", "bc", "bc"], "bc", ONE_PERSON, "b"),
        (["ab", "ab", "bc", "bc"], "bc", TWO_OF_ONE, ""),  # two peers with one token around an honest one
        (["ab", "ab", "bc", "bc", "bd", "bd"], "bd", TWO_OF_ONE, "b"),
        (["ab", "ab", "cd", "cd"], "cd", EACH_OF_ANOTHER, ""),  # two of them that have nothing in common
        (["aa"] * 9, "aa", EACH_OF_ANOTHER, "a"),  # a peer that blames itself
    ],
)
def test_who_is_in_all_of_them(complaints, last, tokens, dismissed):
    parties = {name: replace(peer(i), id=name, token=tokens[name]) for i, name in enumerate(tokens)}
    assert "".join(culprits_of(after(*complaints), parties, *last)) == dismissed


def complain(b: Bench, stage: int, about: int, what=InvalidInput) -> list[str]:
    """Who is dismissed when the holder of a stage says this of another, in the middle of a step."""
    b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
    before, peer = set(b.state.peers), b.state.history.holders[stage]
    reason = MessagesDiffer(3, min(stage, about)) if what is MessagesDiffer else PeerReport(what(about, "bad"))
    b.now += timeouts.LINK_MEND
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
            b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
            b.answer()  # a step is decided: links that break in a row are forgotten
    assert found == [[], [], [], [suspect]]


def test_broken_links_are_nobodys_fault():
    b = Bench(make_spec(stages=3, steps=30))
    b.join(0, 1, 2)
    for stage in (0, 2) * 4:
        assert complain(b, stage, 1, LinkBroken) == []
        b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
        b.answer()
    assert b.state.conduct.quarrels == {}


def quarrel(times: int) -> Bench:
    """The holders of stages 0 and 1 have quarrelled so often, and stage 0's is away."""
    b = Bench(make_spec(stages=3, steps=30))
    b.join(0, 1, 2, 3, 4)
    to_step(b, 3)
    pair = b.state.history.holders[:2]
    parties = {i: b.state.peers[i] for i in pair}
    b.state = replace(b.state, conduct=replace(b.state.conduct, quarrels={frozenset(pair): times}, parties=parties))
    b.tell(ev.Left(b.state.history.holders[0], SILENT))
    assert list(b.state.seats.absent) == [b.state.history.holders[0]]
    return b


def test_two_culprits_one_of_whom_is_away_open_one_generation():
    b = quarrel(DISMISS_AFTER - 1)
    before, told_before = b.state.history, len(b.records)
    away, here, *_ = before.holders
    commands = b.tell(ev.Trouble(away, MessagesDiffer(3, 0), 1, before.generation))
    assert {c.peer for c in commands if isinstance(c, ev.Dismiss)} == {away, here}
    assert [r.generation for r in b.records[told_before:] if isinstance(r, Placed)] == [before.generation + 1]
    assert len([c for c in commands if isinstance(c, ev.AssignStage)]) == b.state.stages
    assert not {away, here} & {*b.state.peers, *b.state.seats.absent, *b.state.history.holders}


def test_a_complaint_of_a_holder_that_is_away_counts_and_relinks_nobody():
    """Witnesses of a step are compared when the last of them is heard, and one may be away by then."""
    b = quarrel(1)
    before = b.state
    away, here, *_ = before.history.holders
    assert b.tell(ev.Trouble(away, MessagesDiffer(3, 0), 1, before.history.generation)) == []
    assert b.state == replace(before, conduct=replace(before.conduct, quarrels={frozenset((away, here)): 2}))


def of_several(spares: int, stages: int = 3) -> Bench:
    """Every peer has its own token; so many have no stage. A step has been decided."""
    b = Bench(make_spec(stages=stages, steps=60, snapshots={"interval": 2}))
    for i in range(stages + spares):
        b.tell(ev.Joined(replace(peer(i), token=f"t{i}")))
    to_step(b, 4)
    return b


@pytest.mark.parametrize("what", [InvalidInput, LinkBroken])
@pytest.mark.parametrize("spares", [0, 2])
def test_one_peers_word_dismisses_nobody_and_moves_at_most_that_peer(what, spares):
    """However often it says so: as a holder of this stage, and of whatever it is given next."""
    b = of_several(spares)
    liar, honest = b.state.history.holders[1], b.state.peers.keys() - {b.state.history.holders[1]}
    for _ in range(20):
        if (stage := b.state.stage_of(liar)) is not None:
            complain(b, stage, stage - 1 if stage else 1, what)
    to_step(b, b.state.history.step + 1)
    assert b.state.peers.keys() >= honest
    given_up = {n.peer for n in told(b.commands, notices.StageGivenUp)}
    assert given_up == ({liar} if spares else set())
    assert b.state.stage_of(liar) is None or not spares


def test_a_flood_of_complaints_is_one_complaint():
    b = of_several(2)
    generation = b.state.history.generation
    for _ in range(20):
        b.tell(ev.Trouble(b.state.history.holders[0], PeerReport(LinkBroken(1)), 1, b.state.history.generation))
    assert b.state.history.generation == generation + 1
    assert len(b.state.peers) == 5


def test_of_two_whose_link_keeps_breaking_one_gives_its_stage_up_and_the_run_goes_on():
    b = of_several(1)
    accuser, accused, *_ = b.state.history.holders
    for _ in range(APART):
        assert b.state.history.holders[:2] == (accuser, accused)
        complain(b, 0, 1, LinkBroken)
    assert b.state.history.holders[0] == "p3"
    [given_up] = told(b.commands, notices.StageGivenUp)
    assert (given_up.peer, given_up.stage, given_up.reason.kind) == (accuser, 0, "peer_report")
    assert accuser in b.state.peers
    for _ in range(APART):  # the new neighbour cannot work with it either
        complain(b, 0, 1, LinkBroken)
    assert b.state.stage_of(accused) is None
    assert set(b.state.history.holders) >= {"p3", accuser}
    b.finish()


def test_a_holder_that_complains_after_every_step_gives_its_stage_up():
    b = of_several(1)
    accuser = b.state.history.holders[0]
    for _ in range(MOST_COMPLAINTS):
        assert b.state.history.holders[0] == accuser
        complain(b, 0, 1, LinkBroken)
        step = b.state.history.step
        b.answer_until(lambda step=step: b.state.history.step > step)
    assert b.state.stage_of(accuser) is None
    b.finish()
