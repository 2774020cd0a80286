"""Attacks on a coordinator's port from a process of its own, as they were seen: none of them holds up a peer."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from typing import Any

import psutil
import pytest
from conftest import make_spec
from door_tools import needs_two_addresses
from guest import a_guest
from pool import Pool
from waiting import PATIENCE

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.bench import strangers
from protomodels_cli.bench.strangers import Http2, half_sent, loopback_addresses, tls_to
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.tls import new_key, public_key_of

pytestmark = [pytest.mark.waiting, needs_two_addresses]

MIB = 1 << 20


@pytest.fixture
def link(pool: Pool) -> JoinLink:
    """Of a coordinator that waits for peers, with room for 256 connections, 32 of them strangers'."""
    limits = {"connections": 256, "connections_per_address": 16}
    return JoinLink.parse((pool.start(make_spec(stages=1, steps=2, limits=limits), []) / "link").read_text())


async def gets_in(link: JoinLink) -> None:
    async with asyncio.timeout(PATIENCE), a_guest(link) as guest:
        call = guest.session()
        await call.write(guest.register())
        await call.read()


def test_who_sends_nonsense_with_a_token_is_cut_off_and_others_behind_the_same_address_get_in(link: JoinLink):
    async def story() -> tuple[int, bool]:
        where, batches = (link.host, link.port), strangers.Batches(link.token, random.Random(1))
        connection, answered = Http2(*await strangers.tls_to(where, "127.0.0.1")), 0
        async with asyncio.timeout(PATIENCE):
            for number in range(200):
                if connection.closed:
                    break
                answered += await connection.send_batch(batches, batches.known, 16 * number, 16)
        await gets_in(link)
        return answered, connection.closed

    answered, closed = asyncio.run(story())
    assert closed
    assert answered < 100, "16 that may fail, those on their way, and a few a second"


def test_messages_that_never_end_take_no_memory_and_hold_nobody_up(pool: Pool, link: JoinLink):
    """By a process of its own, as strangers are."""
    words = [sys.executable, __file__, str(link), str(pool.coordinator.pid)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


async def never_end(link: JoinLink, coordinator: psutil.Process) -> None:
    where = link.host, link.port
    await gets_in(link)
    before = coordinator.memory_info().rss
    sending = (half_sent(where, source, 16, 2 * MIB, 4 * MIB) for source in loopback_addresses(4) * 4)
    crowd = [one for one in await asyncio.gather(*sending, return_exceptions=True) if isinstance(one, Http2)]
    assert len(crowd) >= 8
    assert coordinator.memory_info().rss - before < 16 * MIB
    await gets_in(link)
    for one in crowd:
        one.close()


def test_connections_that_say_nothing_make_way(link: JoinLink):
    async def story() -> None:
        where, held = (link.host, link.port), []
        for source in loopback_addresses(16) * 5:
            held.append(Http2(*await tls_to(where, source)))
        await gets_in(link)
        assert sum(not one.closed for one in held) > 16, "it came beside them, not after"
        for one in held:
            one.close()

    asyncio.run(story())


def test_a_token_cannot_be_used_to_keep_others_out(link: JoinLink):
    key = public_key_of(new_key())
    request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=key).SerializeToString()

    async def story() -> None:
        where = link.host, link.port
        enrolled = await strangers.enrolments(where, "127.0.0.2", link.token, request, 300, quiet=3.0)
        assert 16 <= enrolled < 32, "a burst of 16, and then one every four seconds"
        await gets_in(link)

    asyncio.run(story())


def test_callers_that_hold_all_calls_of_an_address_lock_no_joiner_out_behind_it(pool: Pool, link: JoinLink):
    """Sixteen connections are allowed from there, and the attack holds them all before an honest peer comes."""

    key = public_key_of(new_key())
    request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=key).SerializeToString()

    async def story() -> dict[str, Any]:
        holding = strangers.hold_calls((link.host, link.port), link.token, request, silent=12, enrolling=8)
        attack = asyncio.create_task(holding)
        await asyncio.sleep(2)
        peer = pool.peers[0]
        peer.start(kind="join", link=str(link), name="honest", dir=str(pool.folder / "honest"))
        result = await asyncio.to_thread(peer.result, 2 * PATIENCE)
        assert not attack.done()
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        return result

    assert asyncio.run(story())["exit"] == 0
    assert pool.coordinator.result()["exit"] == 0


def test_nonsense_is_refused_and_does_not_fill_the_log(pool: Pool, link: JoinLink):
    log, draw = pool.folder / "coordinator.log", random.Random(18)
    before = log.stat().st_size
    where = link.host, link.port

    async def say_nonsense(source: str, kind: int) -> None:
        nonsense = draw.randbytes(300)
        if kind == 0:  # instead of TLS, or within its handshake
            _, writer = await asyncio.open_connection(*where, local_addr=(source, 0))
            writer.write(b"\x16\x03\x01\x01\x00" + nonsense if draw.random() < 0.7 else nonsense)
        else:  # instead of a message, with a token or without one; or a message that is too large
            connection = Http2(*await tls_to(where, source))
            for _ in range(8):
                stream = connection.call(strangers.ENROL, [("token", link.token)] if kind == 1 else [])
                large = draw.random() < 0.5
                await connection.send(stream, strangers.message(bytes(20_000) if large else nonsense), end=True)
            writer = connection._writer
        await asyncio.sleep(0.2)
        writer.transport.abort()

    async def story() -> None:
        await gets_in(link)
        for turn in range(20):
            sources = loopback_addresses(6, first=2 + 6 * turn)
            await asyncio.gather(*(say_nonsense(source, i % 3) for i, source in enumerate(sources)))
        await gets_in(link)

    asyncio.run(story())
    said = log.read_bytes()[before:]
    assert len(said) < 4000, said[-2000:]
    assert b"Traceback" not in said


if __name__ == "__main__":
    asyncio.run(never_end(JoinLink.parse(sys.argv[1]), psutil.Process(int(sys.argv[2]))))
