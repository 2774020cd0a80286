"""The relay at the public port: tickets, meetings, and mutual TLS through it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import struct
import time

import pytest
from door_tools import (
    DIALLED,
    HERE,
    MIB,
    QUICK,
    TICKET,
    a_door,
    a_server,
    answer_to,
    both_ways,
    dial,
    echo,
    in_loop,
    tls_context,
    to_the_end,
)
from waiting import PATIENCE, until

from protomodels_cli import timeouts
from protomodels_cli.coordinator.door import Door, DoorLimits
from protomodels_cli.coordinator.routes import Routes
from protomodels_cli.errors import EXIT_REFUSED
from protomodels_cli.wire import tls
from protomodels_cli.wire.relay import RelayedAcceptor, RelayedDialler, RelayError, dial_relay
from protomodels_cli.wire.splice import splice


@in_loop
async def test_mutual_tls_through_the_relay_and_again_after_it_broke(authority):
    server = tls_context(authority.issue_with_key(tls.peer_name("serves")), server=True)
    client = tls_context(authority.issue_with_key(tls.peer_name("dials")), server=False)
    limits = DoorLimits(relay_seconds=1)
    served = []

    async def serving(reader, writer):
        served.append(writer.get_extra_info("peercert")["subjectAltName"])
        await echo(reader, writer)

    async with a_server(serving, server) as target_port, a_door(authority, limits=limits) as (door, port):
        door.allow(TICKET)
        acceptor = RelayedAcceptor((HERE, port), TICKET, (HERE, target_port))
        dialler = RelayedDialler((HERE, port), TICKET)
        acceptor.start()
        local_port = await dialler.open()

        async def transfer(size):
            reader, writer = await dial(local_port, ssl=client, server_hostname=tls.peer_name("serves"))
            data = secrets.token_bytes(size)
            assert await both_ways(reader, writer, data) == data
            return reader, writer

        first = await transfer(5 * MIB)
        second = await transfer(1000)  # while the first still lives: a reconnect does not wait for its death
        first[1].close()
        second[1].transport.abort()
        third = await transfer(1000)
        assert served == [(("DNS", "dials.peer.pmtrain"),)] * 3
        assert acceptor.problem is None
        assert dialler.problem is None
        door.forbid(TICKET)
        assert await to_the_end(third[0]) == b""
        await until(lambda: acceptor.problem is not None)
        assert acceptor.error.kind == "unknown_ticket"
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await transfer(1)
        assert dialler.error.kind == "unknown_ticket"
        door.allow(TICKET)
        await transfer(1000)
        await acceptor.close()
        await dialler.close()
        await until(lambda: door.connections == 0)


@in_loop
async def test_an_acceptor_waits_for_its_relay_to_come_back(authority, monkeypatch):
    monkeypatch.setattr(timeouts, "RELAY_FIRST_PAUSE", 0.01)
    async with a_server(echo) as target_port:
        async with a_door(authority) as (_, port):
            pass
        acceptor = RelayedAcceptor((HERE, port), TICKET, (HERE, target_port))
        acceptor.start()
        await until(lambda: acceptor.problem is not None)
        assert f"127.0.0.1:{port}" in acceptor.problem
        assert isinstance(acceptor.error, ConnectionRefusedError)
        door = Door(authority.certificate_pem, (HERE, 1), QUICK)
        await door.open(HERE, port)
        door.allow(TICKET)
        await until(lambda: acceptor.problem is None)
        await asyncio.sleep(1.5 * QUICK.relay_seconds)  # sent away as nobody came, it is back by itself
        reader, writer = await dial_relay(HERE, port, TICKET, "dial")
        DIALLED.append(writer)
        assert await both_ways(reader, writer, b"hello") == b"hello"
        await acceptor.close()
        await door.close()


@in_loop
async def test_a_ticket_is_needed_and_can_be_withdrawn(authority):
    async with a_door(authority) as (door, port):
        with pytest.raises(RelayError, match=f":{port}") as error:
            await dial_relay(HERE, port, TICKET, "dial")
        assert (error.value.kind, error.value.exit_code) == ("unknown_ticket", EXIT_REFUSED)
        assert door.refused == {"unknown_ticket": 1}
        assert await answer_to(port, b"PMTRAIN 1 RELAY a-ticket_1 accept\n") == b"UNKNOWN\n"
        door.allow(TICKET)
        waits = asyncio.create_task(answer_to(port, b"PMTRAIN 1 RELAY a-ticket_1 accept\n"))
        await until(lambda: door._meetings._waiting)
        door.forbid(TICKET)
        assert await waits == b"UNKNOWN\n"
        for bad in ("", "a b", "a\n", "t" * 161):
            with pytest.raises(ValueError, match="160"):
                door.allow(bad)
            with pytest.raises(ValueError, match="160"):
                await dial_relay(HERE, port, bad, "dial")
            with pytest.raises(ValueError, match="160"):
                RelayedAcceptor((HERE, port), bad, (HERE, port))


@in_loop
async def test_who_waits_alone_is_told_so(authority):
    async with a_door(authority) as (door, port):
        door.allow(TICKET)
        began = time.monotonic()
        with pytest.raises(RelayError) as error:
            await dial_relay(HERE, port, TICKET, "dial")
        assert error.value.kind == "other_peer_missing"
        assert time.monotonic() - began > QUICK.relay_seconds * 0.9
        assert not door.refused  # waiting in vain is no offence


@pytest.mark.parametrize("role", ["accept", "dial"])
@in_loop
async def test_the_newest_of_two_that_wait_is_the_one_that_meets(authority, role):
    other = {"accept": "dial", "dial": "accept"}[role]
    async with a_door(authority, limits=DoorLimits(relay_seconds=5)) as (door, port):
        door.allow(TICKET)
        line = f"PMTRAIN 1 RELAY {TICKET} {role}\n".encode()
        stale, _ = await dial(port, line)
        await until(lambda: door._meetings._waiting)
        fresh, fresh_writer = await dial(port, line + b"early words")
        assert await to_the_end(stale) == b""
        reader, writer = await dial_relay(HERE, port, TICKET, other)
        DIALLED.append(writer)
        writer.write(b"late words")
        assert await reader.readexactly(11) == b"early words"
        assert await fresh.readexactly(13) == b"OK\nlate words"
        fresh_writer.write_eof()  # half-closes pass through a relay as well
        assert await reader.read() == b""
        writer.write(b"last words")
        writer.write_eof()
        assert await fresh.read() == b"last words"
        await until(lambda: door.connections == 0)


@pytest.mark.parametrize("rudely", [False, True])
@in_loop
async def test_nobody_is_connected_to_someone_who_has_left(authority, rudely):
    async with a_door(authority, limits=DoorLimits(relay_seconds=0.5)) as (door, port):
        door.allow(TICKET)
        _, writer = await dial(port, b"PMTRAIN 1 RELAY a-ticket_1 accept\n")
        [waits] = (await until(lambda: door._meetings._waiting)).values()
        if rudely:  # a reset instead of a goodbye
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await until(lambda: waits.stream[0].at_eof() or waits.stream[1].is_closing(), "it is not known to have left")
        with pytest.raises(RelayError) as error:
            await dial_relay(HERE, port, TICKET, "dial")
        assert error.value.kind == "other_peer_missing"


@contextlib.asynccontextmanager
async def two_connections(*says):
    """Near ends and far ends of two connections, over which this was said from near."""
    ends = asyncio.Queue()

    async def hand_over(reader, writer):
        ends.put_nowait((reader, writer))
        await asyncio.sleep(60)

    async with a_server(hand_over) as port:
        pairs = [(await dial(port, first), await ends.get()) for first in says]
        yield [near for near, _ in pairs], [far for _, far in pairs]


@in_loop
async def test_splice_does_not_wait_for_the_dead(monkeypatch):
    """One side has finished and the other says nothing and does not leave: that ends after a while."""
    monkeypatch.setattr("protomodels_cli.wire.splice.LINGER_SECONDS", 0.2)
    async with two_connections(b"12345", b"123") as ((a, b), far):
        splicing = asyncio.create_task(splice(*far))
        assert await b[0].readexactly(5) == b"12345"
        a[1].write_eof()
        assert await b[0].read() == b""
        await asyncio.wait_for(splicing, PATIENCE)
        assert await a[0].read() == b"123"
        assert await to_the_end(b[0]) == b""


@in_loop
async def test_what_was_said_and_ended_before_a_splice_goes_through_it():
    async with two_connections(b"the first two and the rest", b"") as ((a, b), far):
        a[1].write_eof()
        reader = far[0][0]
        assert await reader.readexactly(9) == b"the first"
        await until(lambda: reader._eof)
        splicing = asyncio.create_task(splice(*far))
        assert await b[0].read() == b" two and the rest"
        b[1].write(b"an answer")
        b[1].write_eof()
        assert await a[0].read() == b"an answer"
        await asyncio.wait_for(splicing, PATIENCE)


@in_loop
async def test_what_came_before_a_splice_does_not_make_it_take_more_than_the_other_side_does():
    async with two_connections(b"", b"") as ((a, _), far):
        for end in far[1][1], far[0][1]:
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        a[1].write(bytes(64 * MIB))
        await until(lambda: len(far[0][0]._buffer) > 2**16)  # its reader has stopped
        splicing = asyncio.create_task(splice(*far))
        there = far[1][1].transport
        await until(lambda: there.get_write_buffer_size() > 0 and not far[0][1].transport.is_reading())
        assert there.get_write_buffer_size() < MIB
        splicing.cancel()


@pytest.mark.parametrize("broken", ["reset-before", "cut-before", "reset-later"])
@in_loop
async def test_a_connection_that_breaks_ends_a_splice_at_once_whichever_way_has_ended(broken):
    async with two_connections(b"", b"") as ((a, b), far):
        splicing = asyncio.create_task(splice(*far)) if broken == "reset-later" else None
        if splicing:
            b[1].write_eof()
            assert await a[0].read() == b""
        b[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        (far if broken == "cut-before" else (a, b))[1][1].transport.abort()
        if splicing:
            a[1].write(b"to nobody")
        else:
            await until(lambda: far[1][1].is_closing())
            await asyncio.sleep(0.01)  # until all have been told
        await asyncio.wait_for(splicing or splice(*far), PATIENCE)
        assert await to_the_end(a[0]) == b""


@in_loop
async def test_bytes_pass_a_splice_without_a_task_for_either_direction():
    """What two tasks for each of a thousand idle peers cost kept decisions waiting."""
    async with two_connections(b"", b"") as ((a, b), far):
        tasks = len(asyncio.all_tasks())
        splicing = asyncio.create_task(splice(*far))
        for near, other in ((a, b), (b, a)):
            near[1].write(b"12345")
            assert await other[0].readexactly(5) == b"12345"
        assert len(asyncio.all_tasks()) == tasks + 1
        splicing.cancel()
        assert await to_the_end(a[0]) == b""


@in_loop
async def test_bytes_are_counted_by_boundary_over_all_tickets_and_a_withdrawn_ticket_leaves_nothing(authority):
    async with a_door(authority) as (door, port):
        routes = Routes(lambda: door, "run")
        for generation in (1, 2):
            routes.renew(1)
            [ticket] = routes._tickets
            ends = await asyncio.gather(*(dial_relay(HERE, port, ticket, role) for role in ("accept", "dial")))
            for (reader, _), (_, writer) in (ends, ends[::-1]):
                writer.write(b"12345"[: 5 if writer is ends[1][1] else 2])
                await reader.read(9)
            assert routes.relayed() == [{"forward": 5 * generation, "backward": 2 * generation}]
            DIALLED.extend(writer for _, writer in ends)
        routes.renew(0)
        assert door._meetings._moved == {}
