"""Peers that say they have a part on their disk: they prove it, or it counts no more. Real files on both sides."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from led import Led
from test_exchange import exchange_of
from test_snapshots import CONTENTS, HASHES, Desk

from protomodels_cli import timeouts
from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.claims import Claims
from protomodels_cli.coordinator.messages import event_of
from protomodels_cli.coordinator.seats import Preparation
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.protocol.parts import Part
from protomodels_cli.protocol.possession import PIECE, PIECES, proof
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

PART = Part(1, 3, 0, HASHES[0])
LACKING = [events.Lacking("p7", PART, disproved=True)]


@given(st.binary(min_size=1, max_size=PIECE), st.binary(min_size=16, max_size=16))
def test_a_proof_is_of_these_bytes_and_this_nonce(content, nonce):
    right = proof(io.BytesIO(content), nonce)
    assert proof(io.BytesIO(content), nonce) == right
    assert proof(io.BytesIO(content), nonce + b"x") != right
    assert proof(io.BytesIO(content[:-1]), nonce) != right
    assert proof(io.BytesIO(content + b"x"), nonce) != right
    assert proof(io.BytesIO(bytes(byte ^ 1 for byte in content)), nonce) != right


def test_a_proof_reads_a_few_pieces_of_whatever_size():
    class Counting(io.BytesIO):
        count = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            self.count += len(found)
            return found

    file = Counting(bytes(10_000_000))
    proof(file, b"n" * 16)
    assert 0 < file.count <= PIECES * PIECE


def a_desk(folder: Path) -> Desk:
    """With a complete snapshot."""
    desk = Desk(folder)
    for stage, content in enumerate(CONTENTS):
        desk.hand_in(stage, content)
    [begun] = desk.state.history.pending
    history = replace(desk.state.history, snapshots=(replace(begun, parts=HASHES, layers=(2, 2)),), pending=())
    desk.state = replace(desk.state, history=history)
    return desk


@pytest.mark.parametrize(
    ("content", "answers", "heard"),
    [
        (CONTENTS[0], True, []),
        (None, True, [events.Lacking("p7", PART)]),
        (CONTENTS[0][:-1], True, LACKING),
        (bytes([1]) * len(CONTENTS[0]), True, LACKING),
        (CONTENTS[0], False, LACKING),
    ],
)
def test_what_is_claimed_is_proved_or_counts_no_more(tmp_path, monkeypatch, content, answers, heard):
    """A peer says that it has PART, and has this."""
    monkeypatch.setattr(timeouts, "PART_PROOF", 60.0 if answers else 0.05)
    desk, machine_hears, asked = a_desk(tmp_path), list[Any](), list[pb.Prove]()

    async def story() -> None:
        upkeep: Any = None  # is for what is lost, not for what is claimed
        led = Led(lambda: desk.state, submit=machine_hears.append, send=lambda peer, prove: asked.append(prove))
        claims_here = Claims(led, desk.snapshots, desk.uploads, upkeep)
        async with exchange_of(desk, tmp_path, lambda notice: None) as exchange:
            said: list[pb.PeerMessage] = []
            exchange._send = lambda **body: said.append(pb.PeerMessage(**body))
            if content is not None:
                exchange.parts.path(PART).write_bytes(content)
            claims_here.hear(events.Prefetched("p7", PART))
            claims_here.hear(events.Prefetched("p7", Part(1, 2, 0, HASHES[0])))  # that the run does not need
            [question] = asked
            if answers:
                await exchange.prove(question)
            for event in [event_of("p7", message, desk.state.spec) for message in said]:
                if isinstance(event, events.Proof):
                    await claims_here.check(event)
                else:
                    machine_hears.append(event)
            await asyncio.sleep(0.0 if answers else 0.1)

    asyncio.run(story())
    assert machine_hears == heard


@pytest.mark.parametrize(
    ("content", "heard"), [(CONTENTS[0], [events.Ready("p7", PART)]), (bytes([1]) * len(CONTENTS[0]), LACKING)]
)
@pytest.mark.parametrize("claimed", [False, True])
def test_a_stage_is_built_when_its_part_is_proved_and_not_before(tmp_path, content, heard, claimed):
    """Whether or not the spare has said before that it has the part."""
    desk, machine_hears, asked = a_desk(tmp_path), list[Any](), list[pb.Prove]()
    desk.prepares("p7", Preparation(PART, 0.0, None))
    upkeep: Any = None

    async def story() -> None:
        led = Led(lambda: desk.state, submit=machine_hears.append, send=lambda peer, prove: asked.append(prove))
        claims_here = Claims(led, desk.snapshots, desk.uploads, upkeep)
        async with exchange_of(desk, tmp_path, lambda notice: None) as exchange:
            said: list[pb.PeerMessage] = []
            exchange._send = lambda **body: said.append(pb.PeerMessage(**body))
            exchange.parts.path(PART).write_bytes(content)
            if claimed:
                claims_here.hear(events.Prefetched("p7", PART))
            for _ in range(3):
                looking = claims_here.look_at(events.Ready("p7", PART))
                assert looking is not None
                await looking
            assert machine_hears == []
            [question] = asked
            await exchange.prove(question)
            for event in [event_of("p7", message, desk.state.spec) for message in said]:
                if isinstance(event, events.Proof):
                    await claims_here.check(event)

    asyncio.run(story())
    assert machine_hears[:1] == heard[:1]


def test_a_part_is_looked_into_once_for_each_time_that_a_spare_is_told_to_build_from_it(tmp_path):
    desk, machine_hears = a_desk(tmp_path), list[Any]()
    upkeep = Upkeep(Led(lambda: desk.state), desk.snapshots, None)
    led = Led(lambda: desk.state, submit=machine_hears.append)
    claims_here = Claims(led, desk.snapshots, desk.uploads, upkeep)
    lost = events.SnapshotLost("p7", 0, 1, 3, "unreadable")
    desk.state = replace(desk.state, history=replace(desk.state.history, generation=4))

    async def story() -> None:
        for asked in (10.0, 10.0, 20.0):
            desk.prepares("p7", Preparation(PART, asked, None))
            await claims_here.look_into(lost)

    asyncio.run(story())
    assert machine_hears == [replace(lost, whole_here=True)] * 2


def test_a_part_that_is_damaged_is_said_to_be_lacking_and_fetched(tmp_path):
    """By the peer itself, before it is used."""
    desk, said = a_desk(tmp_path), list[str]()

    async def story() -> None:
        async with exchange_of(desk, tmp_path, lambda notice: None) as exchange:
            exchange._send = lambda **body: said.extend(body)
            exchange.parts.path(PART).write_bytes(CONTENTS[0][:-9] + bytes([1] * 9))
            assert await exchange.find(PART) is True
            assert exchange.parts.is_whole(PART)
            assert await exchange.find(PART) is False

    asyncio.run(story())
    assert said == ["lacking"]
