"""Peers that say too much, or do not listen: counted, sent away with the reason, and hung up on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import make_spec
from guest import Guest, a_guest, flood
from led import Led
from scene import a_spec
from waiting import PATIENCE, until

from protomodels_cli import timeouts
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import sessions
from protomodels_cli.coordinator.reasons import NotReading, TooManyMessages
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.service import Service
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.rates import Bucket, Rate

BEAT = pb.PeerMessage(heartbeat=pb.Heartbeat())
WORD = pb.PeerMessage(done=pb.Done(task=1))

TEN = Rate(per_second=10.0, burst=5.0)
TAKEN = [  # at these times so many tokens: how many of them there were
    ([(0.0, 1)] * 7, 5),
    ([(0.0, 5), (0.1, 1), (0.1, 1)], 2),
    ([(0.1 * i, 1) for i in range(50)], 50),
    ([(0.05 * i, 1) for i in range(50)], 29),
    ([(0.0, 6)], 0),
    ([(0.0, 5), (100.0, 5), (100.0, 1)], 2),
    ([(5.0, 5), (4.0, 1), (5.2, 1)], 2),  # a clock that goes back gives nothing away
]


@pytest.mark.parametrize(("asked", "right"), TAKEN)
def test_a_bucket_lets_through_its_burst_and_then_its_rate(asked: list[tuple[float, float]], right: int):
    bucket, let_through = Bucket.full(TEN, asked[0][0]), 0
    for now, tokens in asked:
        if (left := bucket.take(TEN, tokens, now)) is not None:
            bucket, let_through = left, let_through + 1
            assert 0 <= left.tokens <= TEN.burst
    assert let_through == right


def test_honest_bursts_are_far_below():
    """A step every 2 ms with a heartbeat five times a second, a spare that has many parts, the end of a large run."""
    peer, now = sessions.EnrolledPeer(0.0), 0.0
    for i in range(5000):
        now += 0.002
        peer.was_sent()
        assert peer.may_say(WORD, now)
        assert i % 100 or peer.may_say(BEAT, now)
    part = pb.PeerMessage(prefetched=pb.Part(lineage=1, step=1, stage=1, sha256="0" * 64))
    assert all(peer.may_say(part, now) for _ in range(200))
    names = [pb.ParameterHash(name=f"layers.{i}.attn.q.weight", sha256="0" * 64) for i in range(12 * 126)]
    assert peer.may_say(pb.PeerMessage(done=pb.Done(parameters=names)), now)


@asynccontextmanager
async def a_service(folder: Path, told: list[ev.Event], take: bool = True) -> AsyncIterator[tuple[Service, JoinLink]]:
    """Without a machine behind it; `take`: what is told counts as processed."""
    spec, nothing = make_spec(), None
    run_dir = open_run_dir(folder / "run", spec, Path())

    def submit(event: ev.Event) -> None:
        told.append(event)
        if isinstance(event, ev.Joined):
            service.joined_processed(event.peer.id)
        if take:
            asyncio.get_running_loop().call_soon(service.taken, event)

    service = Service(spec, run_dir, Led(submit=submit), nothing, nothing)  # type: ignore[arg-type]
    port = await service.open("127.0.0.1", 0)
    try:
        yield service, JoinLink("127.0.0.1", port, run_dir.token, run_dir.authority.fingerprint)
    finally:
        await service.close()


async def joined(guest: Guest, told: list[ev.Event]) -> tuple[Any, str]:
    call = guest.session()
    await call.write(guest.register())
    await until(lambda: any(isinstance(event, ev.Joined) for event in told))
    return call, guest.metadata[0][1]


@pytest.mark.parametrize("message", [BEAT, WORD], ids=["heartbeats", "reports"])
def test_no_more_is_taken_than_the_bucket_has_and_the_peer_is_hung_up_on(tmp_path: Path, monkeypatch, message):
    monkeypatch.setattr(sessions, "FROM_PEER", Rate(1.0, 50.0))
    told: list[ev.Event] = []

    async def story() -> None:
        async with a_service(tmp_path, told) as (service, link), a_guest(link) as guest:
            call, peer = await joined(guest, told)
            said = asyncio.create_task(guest.said_until_the_end(call))
            await flood(call, message, 2000, 0.5)
            await until(lambda: any(isinstance(event, ev.Trouble) for event in told))
            service.dismiss(peer, for_good=True, dismissal=pb.Dismissal(kind="too_many_messages"))
            async with asyncio.timeout(PATIENCE):
                [last] = await said
            assert last.dismissal.kind == "too_many_messages"
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async with a_guest(link):  # as another
                    pass
            assert dict(error.value.trailing_metadata())["kind"] == "cooling_off"
            again = guest.session()
            await again.write(guest.register())
            for refused in (again.read(), guest.stub.Offer(pb.UploadHeader(), metadata=guest.metadata)):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await refused
                assert dict(error.value.trailing_metadata())["kind"] == "was_dismissed"

    asyncio.run(story())
    words = [event for event in told if isinstance(event, ev.Done)]
    assert len(words) <= 53
    assert bool(words) == (message is WORD)
    assert [event.what for event in told if isinstance(event, ev.Trouble)] == [TooManyMessages(1.0)]
    assert [type(event) for event in told].count(ev.Left) == 1


def test_what_waits_for_the_machine_is_bounded(tmp_path: Path, monkeypatch):
    """A machine that does not come to it is not the peer's fault: it is read from again."""
    monkeypatch.setattr(sessions, "MOST_UNTAKEN", 20)
    told: list[ev.Event] = []

    async def story() -> None:
        async with a_service(tmp_path, told, take=False) as (service, link), a_guest(link) as guest:
            call, _ = await joined(guest, told)
            await flood(call, WORD, 2000, 0.2)
            await until(lambda: sum(isinstance(event, ev.Done) for event in told) == 20)
            await asyncio.sleep(0.3)  # in which no more of them are read
            words = [event for event in told if isinstance(event, ev.Done)]
            assert len(words) == 20
            for event in words:
                service.taken(event)
            await until(lambda: sum(isinstance(event, ev.Done) for event in told) == 40)
            call.cancel()

    asyncio.run(story())
    assert not any(isinstance(event, ev.Trouble) for event in told)


def test_what_waits_for_a_peer_that_does_not_read_is_bounded_and_its_stream_is_closed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timeouts, "SESSION_CLOSE", 0.2)
    told: list[ev.Event] = []

    async def story() -> None:
        async with a_service(tmp_path, told) as (service, link), a_guest(link) as guest:
            _, peer = await joined(guest, told)
            most = sessions.most_waiting(make_spec())
            large = b"x" * 100_000
            for _ in range(most + 100):
                service.send(peer, feed=pb.Feed(ids=large))
            stream = service._enrolled[peer].stream
            assert stream is not None
            await asyncio.sleep(0.3)
            assert not stream.outbox.empty(), "otherwise it reads"
            service.dismiss(peer, for_good=True, dismissal=pb.Dismissal())
            await until(lambda: service._enrolled[peer].stream is None)
            assert stream.serving is not None
            await until(lambda: stream.serving is not None and stream.serving.done())

    asyncio.run(story())
    [trouble] = [event for event in told if isinstance(event, ev.Trouble)]
    assert isinstance(trouble.what, NotReading)


def test_others_may_join_from_elsewhere_at_once_and_from_there_after_a_while():
    cooling = sessions.CoolingOff()
    cooling.begin("run", "2001:db8::1", 10.0)
    cooling.begin("run", "192.0.2.7", 20.0)
    assert cooling.seconds_left("run", "2001:db8::2", 10.0) == sessions.COOLING_SECONDS, "of the same household"
    assert not cooling.seconds_left("a1", "2001:db8::2", 10.0), "with a token of its own"
    for ip, now in (("192.0.2.8", 20.0), ("2001:db8:1::1", 10.0), ("2001:db8::1", 71.0), ("", 10.0)):
        assert not cooling.seconds_left("run", ip, now)


def test_heartbeats_do_not_pile_up():
    async def story() -> None:
        stream = sessions.ControlStream()
        for _ in range(100):
            stream.beat()
        assert stream.outbox.qsize() == 1

    asyncio.run(story())


@pytest.mark.full
def test_a_flood_beside_a_run_is_ended_and_the_run_goes_on(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(2)

    async def story() -> None:
        async with a_guest(JoinLink.parse((s.run_dir / "link").read_text())) as guest, asyncio.timeout(PATIENCE):
            call = guest.session()
            await call.write(guest.register())
            said = asyncio.create_task(guest.said_until_the_end(call))
            await flood(call, WORD, 8000, 20)
            with suppress(grpc.aio.AioRpcError):  # of a write that was cut off: then nothing more is read
                assert (await said)[-1].dismissal.kind == "too_many_messages"

    asyncio.run(story())
    [sent_away] = s.events("peer_dismissed")
    assert (sent_away["name"], sent_away["reason"]["kind"]) == ("guest", "too_many_messages")
    assert s.ends_well()["generations"] == 1
