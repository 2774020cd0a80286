"""Who may fetch a stage's part of a snapshot: the rule, and honest peers that gain and lose the right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_spec
from test_claims import PART, a_desk
from test_exchange import exchange_of
from test_snapshots import CONTENTS, HASHES
from waiting import PATIENCE

from protomodels_cli import timeouts
from protomodels_cli.coordinator import part_rights
from protomodels_cli.coordinator.history import Mark, beginning
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.refusals import NoSession, PartNotAssigned
from protomodels_cli.coordinator.seats import Preparation, assigned
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Task, Unplaced, Working
from protomodels_cli.protocol.parts import Part
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

OLD, NEW, OTHER_CUT = (1, 3), (1, 6), (0, 0)

AT_WORK = Working(Task(1, "step", 4, 0.0))


def a_state(warm: bool = False, **changes: Any) -> State:
    """`left` and `right` hold a stage each, `spare` holds none, and `away` has no session."""
    marks = [
        Mark(*OTHER_CUT, 0, "u", layers=(3, 1), parts=HASHES),
        *(Mark(*key, 0, "u", layers=(2, 2), parts=HASHES) for key in (OLD, NEW)),
    ]
    history = replace(
        beginning("u"),
        snapshots=tuple(marks),
        layers=(2, 2),
        stage_holders=(("left",), ("right",)),
        generation=4,
    )
    peers = {id: Peer(id, id, "cpu", 1 << 30, 1e9, "", 0, 0.0) for id in ("left", "right", "spare", "warm")}
    spec = make_spec(stages=2, snapshots={"warm_spares": warm})
    state = State(spec, (1, "t"), history, peers, seats=assigned(["left", "right"], {}), work=AT_WORK)
    return replace(state, **changes)


def building(stage: int, snapshot: tuple[int, int] = NEW) -> dict[str, Any]:
    preparation = Preparation(Part(*snapshot, stage, HASHES[stage]), 0.0, None)
    return {"seats": assigned(["left", "right"], {}).prepared("spare", preparation)}


@pytest.mark.parametrize(
    ("state", "peer", "snapshot", "stages"),
    [
        (a_state(), "left", NEW, {0}),
        (a_state(), "right", NEW, {1}),
        (a_state(), "right", OLD, {1}),
        (a_state(), "right", OTHER_CUT, set()),
        (a_state(), "spare", NEW, set()),
        (a_state(work=Unplaced()), "left", NEW, set()),
        (a_state(**building(1)), "spare", NEW, {1}),
        (a_state(**building(1)), "spare", OLD, set()),
        (a_state(work=Unplaced(), **building(1)), "spare", NEW, {1}),
        (a_state(warm=True), "spare", NEW, {0, 1}),
        (a_state(warm=True), "spare", OLD, set()),
        (a_state(warm=True), "left", NEW, {0}),
        (a_state(warm=True, **building(1)), "spare", NEW, {1}),
    ],
)
def test_a_part_goes_to_who_was_told_to_use_it(state: State, peer: str, snapshot: tuple[int, int], stages: set[int]):
    for stage in (0, 1):
        right = None if stage in stages else PartNotAssigned(stage, snapshot[1])
        assert part_rights.refusal(state, peer, snapshot, stage, ()) == right
    away = replace(state, peers={id: known for id, known in state.peers.items() if id != peer})
    assert part_rights.refusal(away, peer, snapshot, 0, ()) == NoSession()


def test_a_spare_that_audits_a_stage_may_have_its_part_and_no_other():
    audited = [Part(*NEW, 1, HASHES[1])]
    assert part_rights.refusal(a_state(), "spare", NEW, 1, audited) is None
    assert part_rights.refusal(a_state(), "spare", NEW, 0, audited) == PartNotAssigned(0, NEW[1])
    assert part_rights.refusal(a_state(), "spare", OLD, 1, audited) == PartNotAssigned(1, OLD[1])


@pytest.mark.parametrize("lost", ["session", "stage"])
def test_a_peer_whose_session_or_order_is_late_gets_its_part_once_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
):
    monkeypatch.setattr(timeouts, "PART_RETRY_URGENT", 0.02)
    desk = a_desk(tmp_path)
    before = desk.state

    async def story() -> None:
        async with exchange_of(desk, tmp_path, lambda notice: None) as exchange, asyncio.timeout(PATIENCE):
            desk.state = replace(before, **({"peers": {}} if lost == "session" else {"work": Unplaced()}))
            finding = asyncio.create_task(exchange.find(PART))
            await asyncio.sleep(0.3)
            assert not finding.done(), "it was refused, and neither gave up nor got the part"
            desk.state = before
            assert await finding is True
            assert exchange.parts.path(PART).read_bytes() == CONTENTS[0]

    asyncio.run(story())


def test_a_fetch_that_is_under_way_goes_on_when_the_generation_changes(tmp_path: Path):
    desk = a_desk(tmp_path)

    async def story() -> bytes:
        async with exchange_of(desk, tmp_path, lambda notice: None) as exchange, asyncio.timeout(PATIENCE):
            call = exchange._stub.Fetch(metadata=exchange._metadata)
            await call.write(pb.FetchRequest(lineage=1, step=3, stage=0, size=100))
            first = (await call.read()).data
            desk.state = replace(desk.state, work=Unplaced(), peers={})
            await call.write(pb.FetchRequest(offset=100, size=1 << 20))
            return first + (await call.read()).data

    assert asyncio.run(story()) == CONTENTS[0]
