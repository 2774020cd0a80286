"""Who audits whom and what follows, without processes: a third of liars cannot have an honest peer dismissed."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st
from machine_bench import Bench, peer, to_step
from machine_bench import told as reseating_of
from test_reseating import a_run
from tiers import first

from protomodels_cli.coordinator import audit_notices as told
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts
from protomodels_cli.coordinator.contradictions import Contradictions, quorum
from protomodels_cli.coordinator.judging import Hearing, Judge
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.reseat_notices import StageReseating
from protomodels_cli.coordinator.voices import voice_of
from protomodels_cli.protocol.audit import Compared, drawn

LIE, NONE = Compared("forward", 1000, 400), Compared("forward", 1000, 0)


@pytest.mark.parametrize(("voices", "words"), [(2, 2), (3, 2), (5, 2), (6, 3), (8, 3), (9, 4), (30, 11)])
def test_more_than_a_third_have_to_contradict_a_liar(voices: int, words: int):
    assert quorum(voices) == words


@given(st.integers(3, 12), st.data())
def test_no_words_of_a_third_harm_an_honest_voice(n: int, data: st.DataObject):
    """Honest voices say what is true, liars anything: whom they accuse, and whom they clear."""
    voices = [f"v{i}" for i in range(n)]
    liars = set(voices[: n // 3])
    words = Contradictions()
    for _ in range(data.draw(st.integers(1, 8))):
        suspect, *asked = data.draw(st.permutations(voices))
        lied = suspect in liars and data.draw(st.booleans())
        said = {v: data.draw(st.booleans()) if v in liars else lied for v in asked[: data.draw(st.integers(1, n - 1))]}
        words = words.accused(suspect, [v for v in said if said[v]], [v for v in said if not said[v]])
        assert words.liars(voices) <= liars


class Trials:
    """A placed run with spares, each of a token of its own unless told, and audits whose auditors say what they say."""

    def __init__(self, stages: int, spares: int, seed: int = 0, tokens: dict[str, str] | None = None):
        self.b, self.draw, self.judge = (
            Bench(make_spec(stages=stages, steps=1000, audit=0.05)),
            random.Random(seed),
            Judge(),
        )
        self.told: list[told.AboutAudits] = []
        for i in range(stages + spares):
            self.join(f"p{i}", (tokens or {}).get(f"p{i}", f"t{i}"))

    def join(self, id: str, token: str) -> None:
        self.b.tell(ev.Joined(replace(peer(int(id[1:])), id=id, token=token)))

    @property
    def peers(self) -> dict[str, Peer]:
        return dict(self.b.state.peers)

    def holder(self, stage: int) -> str:
        return self.b.state.history.holders[stage]

    def hearing(self, stage: int) -> Hearing:
        history = self.b.state.history
        suspect = self.b.state.peers[history.holders[stage]]
        return Hearing(stage, 2, history.layers, history.holders, suspect)

    def audit(self, stage: int, lying: bool, liars: Collection[str] = (), how: str = "contrary") -> list[str]:
        """Who is asked, the holder of this stage lying or not. Auditors who are liars say what they like."""
        hearing = self.hearing(stage)
        while not self.judge.is_over(self.b.state, hearing):
            auditor = next(self.judge.auditors(self.b.state, hearing, self.draw), None)
            if auditor is None:
                break
            hearing.asked.append(auditor)
            false = auditor.id in liars
            if false and how == "silent":
                self.judge.no_result(auditor)
                continue
            finds = {"contrary": not lying, "accuses": True, "clears": False}[how] if false else lying
            self.told += self.judge.take(hearing, auditor, [LIE if finds else NONE])
            if hearing.accusers:
                self.b.tell(ev.Accused(stage, frozenset(map(voice_of, hearing.accusers))))
        if hearing.accusers or hearing.clearers:
            notices, troubles = self.judge.conclude(self.b.state, hearing)
            self.told += notices
            for trouble in troubles:
                self.b.tell(trouble)
        return [peer.id for peer in hearing.asked]

    def kinds(self) -> list[str]:
        return [notice.kind for notice in self.told]

    def dismissed(self) -> dict[str, Any]:
        found = [c.notice for c in self.b.commands if isinstance(c, ev.Tell) and c.notice.kind == "peer_dismissed"]
        return {notice.peer: notice.reason for notice in found}


def test_two_independent_words_dismiss_a_liar_and_neither_gets_its_seat():
    t = Trials(2, 2)
    liar, other = t.holder(0), t.holder(1)
    assert sorted(t.audit(0, lying=True)) == ["p2", "p3"]
    assert isinstance(t.dismissed()[liar], AuditFailed)
    assert len(t.dismissed()[liar].auditors) == 2
    assert t.holder(0) == other, "the accusers get another seat"
    assert t.holder(1) in ("p2", "p3")


def test_one_spare_alone_dismisses_nobody_and_the_owner_is_told():
    t = Trials(2, 1)
    for _ in range(3):
        t.audit(0, lying=True)
    assert t.kinds() == ["stage_accused", "holder_watched"], "once"
    assert (t.told[-1].words, t.told[-1].needed) == (1, 2)  # type: ignore[union-attr]
    assert not t.dismissed()
    t.join("p3", "t3")  # another word
    assert t.judge.wants(t.b.state, t.hearing(0), t.draw)
    t.audit(0, lying=True)
    assert list(t.dismissed()) == ["p0"]


def test_a_lone_lying_spare_is_sent_away_and_no_honest_holder_is():
    t = Trials(3, 1)
    for stage in range(3):
        t.audit(stage, lying=False, liars=["p3"])
    assert list(t.dismissed()) == ["p3"]
    assert t.dismissed()["p3"] == FalseVerdicts(2, 4)
    t.join("p4", "t3")  # the same person again
    assert t.audit(2, lying=False) == [], "who lied is not asked again"


def test_three_liars_with_one_token_against_one_honest_spare_have_one_voice():
    liars = ["p2", "p3", "p4"]
    t = Trials(2, 4, tokens=dict.fromkeys(liars, "one"))
    for _ in range(4):
        for stage in range(2):
            assert len(set(t.audit(stage, lying=False, liars=liars)) & set(liars)) <= 1
    assert set(t.dismissed()) <= set(liars)
    assert set(t.b.state.history.holders) == {"p0", "p1"}


def test_an_auditor_shares_no_token_with_whom_it_audits():
    t = Trials(2, 3, tokens={"p2": "t0", "p4": "t3"})
    for _ in range(5):
        [asked] = t.audit(0, lying=False)
        assert asked in ("p3", "p4")
    hearing = t.hearing(0)
    t.b.tell(ev.Trouble("p3", AuditFailed(0, 1, "forward", 1, 2, ())))
    t.b.tell(ev.Trouble("p4", AuditFailed(0, 1, "forward", 1, 2, ())))
    assert list(t.judge.auditors(t.b.state, hearing, t.draw)) == []
    assert t.judge.why_nobody(t.b.state, hearing) == "no_independent"
    t.b.tell(ev.Trouble("p2", AuditFailed(0, 1, "forward", 1, 2, ())))
    assert t.judge.why_nobody(t.b.state, hearing) == "no_spare"


def test_who_comes_to_no_result_is_asked_last():
    t = Trials(2, 3)
    for _ in range(2):
        t.judge.no_result(t.peers["p2"])
    assert {t.audit(0, lying=False)[0] for _ in range(20)} == {"p3", "p4"}


@pytest.mark.parametrize("accuses", [False, True])
def test_a_spare_that_accused_a_holder_does_not_get_its_stage_for_being_faster(accuses: bool):
    b = a_run()
    if accuses:
        b.tell(ev.Accused(1, frozenset({voice_of(b.state.peers["p2"])})))
    to_step(b, 40)
    assert bool(reseating_of(b.commands, StageReseating)) != accuses


STAGES, SPARES, LIARS = 3, 6, 3  # nine tokens
SHARE, INTERVAL, MOST_STEPS = 0.05, 10, 600


def steps_until_found(seed: int, how: str) -> int:
    """One liar holds a stage and lies in it, two are spares. No honest peer is dismissed."""
    draw, t = random.Random(seed), Trials(STAGES, SPARES, seed)
    holder = t.holder(draw.randrange(STAGES))
    liars = [holder, *draw.sample([f"p{i}" for i in range(STAGES, STAGES + SPARES)], LIARS - 1)]
    found = 0
    for steps in range(INTERVAL, MOST_STEPS, INTERVAL):
        for stage in drawn(SHARE, INTERVAL, STAGES, draw):
            t.audit(stage, t.holder(stage) in liars, liars, how)
            assert set(t.dismissed()) <= set(liars)
        if holder in t.dismissed() and not found:
            found = steps
    return found


@pytest.mark.parametrize("seed", first(4, range(0, 100, 4)))
def test_liars_with_a_third_of_the_tokens_are_found_and_nobody_else(seed: int):
    for i, how in enumerate(("contrary", "accuses", "clears", "silent")):
        assert steps_until_found(seed + i, how) > 0


if __name__ == "__main__":  # the figures of docs/audit.md
    for how in ("contrary", "accuses", "clears", "silent"):
        found = sorted(steps_until_found(seed, how) for seed in range(200))
        print(
            f"{how}: half within {found[100]} steps, 95 % within {found[190]}, all within {found[-1]}, none {found[0]}"
        )
