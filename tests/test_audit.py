"""Audits, by real processes: a liar is found and dismissed, honest peers are not, and the run is what it would be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_spec
from given_tokens import link_for
from pool import Pool
from scene import expected
from told import events, status_of, wait_for_event
from waiting import wait_for

from protomodels_cli.spec import RunSpec

LIE = {"kind": "perturb", "share": 0.01, "by": 0.1}  # 1 % of the numbers of every message, by 10 %
FREE = ("stages_without_peer", "too_few_peers")  # what a run waits for that lacks a holder
OFTEN = {"audit": 0.2, "snapshots": {"interval": 5, "keep": 20}}  # 0.2 × 5 = 1: every stage after every snapshot


def a_spec(**sections: Any) -> RunSpec:
    sizes: dict[str, Any] = {"model": {"context": 64}, "subspace": {"k": 16}}
    return make_spec(**{"stages": 2, "steps": 400, **OFTEN, **sizes, **sections})


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory, token_cache: None) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("six"), peers=6)
    yield pool
    pool.close()


def start(pool: Pool, spec: RunSpec, spares: int, fault: dict[str, Any] | None = None) -> Path:
    """Two holders, of which the first may have a fault, then spares. Each is another person."""
    run_dir = pool.start(spec, [], fault={"kind": "reseats_nobody"})
    names = [f"{'peer' if i < 2 else 'spare'}-{i}" for i in range(2 + spares)]
    links = [link_for(run_dir, name) for name in names]  # now: once it has holders, the run does not wait
    for i, (name, link) in enumerate(zip(names, links, strict=True)):
        if i == 2:
            wait_for_event(run_dir, "stages_assigned")
        join(pool, run_dir, i, name, fault if i == 0 else None, link=link)
    return run_dir


def join(
    pool: Pool,
    run_dir: Path,
    i: int,
    name: str,
    fault: dict[str, Any] | None = None,
    person: str = "",
    link: str = "",
) -> None:
    """In a folder of its own, so that nobody comes back as a peer that was dismissed."""
    link = link or link_for(run_dir, person or name)
    pool.peers[i].start(kind="join", link=link, name=name, dir=str(run_dir / name), fault=fault or {})
    joined = wait_for_event(run_dir, "peer_joined", name=name)
    assert joined["person"] == (person or name)


@pytest.mark.full
@pytest.mark.parametrize("wire", ["int8", "int4+ef21"])
def test_honest_peers_are_cleared_and_the_run_is_the_same(pool: Pool, wire: str):
    spec = a_spec(wire={"forward": wire, "backward": wire}, steps=60)
    run_dir = start(pool, spec, 1)
    assert pool.coordinator.result(300)["exit"] == 0
    assert {e["stage"] for e in events(run_dir, "stage_audited")} == {0, 1}
    assert not events(run_dir, "stage_accused")
    assert not events(run_dir, "peer_dismissed")
    assert json.loads((run_dir / "summary.json").read_text())["weights_sha256"] == expected(spec)


def test_a_liar_is_found_by_two_and_dismissed(pool: Pool):
    run_dir = start(pool, a_spec(wire={"forward": "int8", "backward": "int8"}), 2, LIE)
    found = wait_for_event(run_dir, "peer_dismissed")
    [liar] = events(run_dir, "peer_joined", name="peer-0")
    assert found["peer"] == liar["peer"]
    assert found["reason"]["kind"] == "audit_failed"
    assert sorted(found["reason"]["auditors"]) == ["spare-2", "spare-3"]
    assert pool.peers[0].result()["exit"] == 3
    wait_for_event(run_dir, "stages_assigned", generation=2)  # a spare goes on in its place


def test_a_peer_that_reports_no_record_cannot_switch_audits_off(pool: Pool):
    run_dir = start(pool, a_spec(steps=20), 1, {"kind": "no_record"})
    found = wait_for_event(run_dir, "peer_dismissed")
    assert (found["name"], found["reason"]["kind"]) == ("peer-0", "invalid_message")
    assert pool.peers[0].result()["exit"] == 3
    assert pool.coordinator.result()["exit"] == 0
    assert len(events(run_dir, "peer_dismissed")) == 1


@pytest.mark.full
def test_one_spare_alone_has_nobody_dismissed_and_the_owner_is_told(pool: Pool):
    run_dir = start(pool, a_spec(steps=100_000), 1, LIE)
    watched = wait_for_event(run_dir, "holder_watched")
    assert (watched["name"], watched["words"], watched["needed"]) == ("peer-0", 1, 2)
    assert watched["reason"]["auditors"] == ["spare-2"]
    before = steps_of(run_dir)
    wait_for(lambda: steps_of(run_dir) > before + 15, "it does not go on")
    assert len(events(run_dir, "stage_accused")) == len(events(run_dir, "holder_watched")) == 1
    assert not events(run_dir, "peer_dismissed")


def test_a_lone_lying_spare_is_sent_away_and_no_honest_holder_is(pool: Pool):
    run_dir = start(pool, a_spec(steps=100_000), 0)
    join(pool, run_dir, 2, "liar", {"kind": "false_verdicts"})
    found = wait_for_event(run_dir, "peer_dismissed")
    assert (found["name"], found["reason"]["kind"]) == ("liar", "false_verdicts")
    assert pool.peers[2].result()["exit"] == 3
    join(pool, run_dir, 2, "liar again", {"kind": "false_verdicts"}, person="liar")
    wait_for_event(run_dir, "audit_given_up", why="no_independent")
    assert {e["name"] for e in events(run_dir, "peer_dismissed")} == {"liar"}


@pytest.mark.full
def test_three_liars_with_one_token_get_no_stage(six: Pool):
    run_dir = start(six, a_spec(steps=100_000), 1)
    for i in (3, 4, 5):
        join(six, run_dir, i, f"liar-{i}", {"kind": "false_verdicts"}, person="liar")
    found = wait_for_event(run_dir, "peer_dismissed")
    assert found["reason"]["kind"] == "false_verdicts"
    before = steps_of(run_dir)
    wait_for(lambda: steps_of(run_dir) > before + 15, "it does not go on")
    assert all(e["name"].startswith("liar") for e in events(run_dir, "peer_dismissed"))
    assert len(events(run_dir, "stages_assigned")) == 1


@pytest.mark.full
def test_without_tokens_one_address_is_one_person_and_that_is_said(pool: Pool):
    run_dir = pool.start(a_spec(steps=30), [{}, {}, {}])
    assert pool.coordinator.result()["exit"] == 0
    assert not events(run_dir, "stage_audited")
    assert {e["why"] for e in events(run_dir, "audit_given_up")} == {"no_independent"}
    assert len(events(run_dir, "audit_given_up")) == 2, "once for each stage"


@pytest.mark.full
@pytest.mark.parametrize("run", range(int(os.environ.get("PMTRAIN_AUDITED_RUNS", "1"))))
def test_liars_are_found_up_to_a_third_of_the_tokens(six: Pool, run: int):
    """Six people, two of them liars: one in its stage, one in its audits. With `audit: 0.05`, a snapshot every 5
    steps."""
    spec = a_spec(steps=100_000, audit=0.05, wire={"forward": "int8", "backward": "int8"})
    run_dir = start(six, spec, 3, LIE)
    join(six, run_dir, 5, "liar", {"kind": "false_verdicts"})
    found = wait_for_event(run_dir, "peer_dismissed", name="peer-0")
    assert found["reason"]["kind"] == "audit_failed"
    print(f"found in step {found['reason']['step']}")
    assert {e["name"] for e in events(run_dir, "peer_dismissed")} <= {"peer-0", "liar"}
    assert not {e["name"] for e in events(run_dir, "stage_accused")} - {"peer-0", "peer-1"}


@pytest.mark.full
def test_two_people_that_report_different_messages_are_relinked_and_neither_is_dismissed(pool: Pool):
    """The liar is one of the two, and nobody can tell which. With a spare one of them would give its stage up."""
    run_dir = start(pool, a_spec(), 0, {"kind": "two_faced"})

    def quarrels() -> list[dict[str, Any]]:
        return [e for e in events(run_dir, "relinking") if e["reason"]["kind"] == "messages_differ"]

    wait_for(lambda: len(quarrels()) > 6, "they were not relinked")
    assert not events(run_dir, "peer_dismissed")


@pytest.mark.full
def test_without_a_spare_it_is_said_that_nobody_looks(pool: Pool):
    run_dir = start(pool, a_spec(steps=30), 0)
    assert pool.coordinator.result()["exit"] == 0
    assert [e["why"] for e in events(run_dir, "audit_given_up")] == ["no_spare"] * 2, "once for each stage"
    [at_the_start] = events(run_dir, "nobody_audits")
    [*_, first] = [e for e in events(run_dir) if e["at"] <= events(run_dir, "audit_given_up")[0]["at"]]
    assert at_the_start["at"] < first["at"], "not only after the first snapshot"


@pytest.mark.full
def test_liar_after_liar_is_replaced_and_the_coordinator_leads_on(pool: Pool):
    """Twice in one run: a holder is killed, a liar takes its stage, is accused and dismissed, a spare goes on."""
    spec = a_spec(steps=100_000, limits={"connections_per_address": 1024})  # its status is asked for without rest
    run_dir = start(pool, spec, 0)
    assignments = 1

    def assigned_again() -> None:
        nonlocal assignments
        wait_for(lambda: len(events(run_dir, "stages_assigned")) > assignments, "the stage has no holder")
        assignments = len(events(run_dir, "stages_assigned"))

    for turn in range(2):
        for i in (0, 3):  # a holder, and from the second turn on the only spare
            pool.peers[i].kill()
        # Before the stage is free, the liar would be a spare, and audit the honest holder.
        wait_for(lambda: status_of(run_dir).waiting_kind in FREE, "its stage is not free")
        join(pool, run_dir, 2, f"liar-{turn}", LIE)
        assigned_again()
        for i in (0, 3):
            join(pool, run_dir, i, f"honest-{turn}-{i}")
        name = f"liar-{turn}"
        wait_for(lambda n=name: events(run_dir, "peer_dismissed", name=n), f"{name} is not dismissed", 300)
        [found] = events(run_dir, "peer_dismissed", name=name)
        assert found["reason"]["kind"] == "audit_failed"
        assert len(found["reason"]["auditors"]) == 2
        assigned_again()
        assert pool.peers[2].result()["exit"] == 3
        before = steps_of(run_dir)
        wait_for(lambda n=before: steps_of(run_dir) > n + 5, "it does not go on")
        assert pool.coordinator.at_work, pool.coordinator.result()
    assert not [e for e in events(run_dir, "peer_dismissed") if not e["name"].startswith("liar")]
    pool.coordinator.kill()  # what the journal has of it can be read again
    pool.coordinator.start(kind="coordinator", spec=spec.model_dump(mode="json"), run_dir=str(run_dir))
    before = steps_of(run_dir)
    wait_for(lambda: steps_of(run_dir) > before + 5, "it does not go on after a restart")
    pool.coordinator.renew()


def steps_of(run_dir: Path) -> int:
    return (run_dir / "metrics.jsonl").read_text().count('"event":"step"')
