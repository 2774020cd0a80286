"""The public port: real sockets, real TLS, real gRPC, and bad company."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from dataclasses import replace

import grpc
import pytest
from door_tools import (
    HELLO,
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
    link_to,
    needs_two_addresses,
    tls_context,
    to_the_end,
)
from waiting import PATIENCE, until

from protomodels_cli.coordinator import door as doors
from protomodels_cli.coordinator.admission import Admission
from protomodels_cli.coordinator.door import Door, DoorLimits
from protomodels_cli.errors import EXIT_OUTSIDE, UserError
from protomodels_cli.wire import tls
from protomodels_cli.wire.join_link import UnreachableError, fetch_authority, refusal

# --- TLS through the door ---------------------------------------------------------------------------------------


@needs_two_addresses
@in_loop
async def test_tls_goes_through_to_the_backend_and_the_caller_is_known(authority):
    """With limits that the connection outlives, in time and in bytes, once its handshake is over."""
    found, seen_ports = [], []

    async def backend(reader, writer):
        seen_ports.append(writer.get_extra_info("peername")[1])
        found.append(door.address_of(seen_ports[-1]))  # after the handshake: the door knows the port by then
        door.known(seen_ports[-1])
        await echo(reader, writer)

    server = tls_context(authority.issue_with_key(tls.COORDINATOR_NAME), server=True)
    client = tls_context(authority.issue_with_key(tls.peer_name("p")), server=False)
    async with a_server(backend, server) as backend_port, a_door(authority, backend_port) as (door, port):
        name = tls.COORDINATOR_NAME
        reader, writer = await dial(port, source="127.0.0.2", ssl=client, server_hostname=name)
        await asyncio.sleep(1.5 * QUICK.handshake_seconds)
        data = secrets.token_bytes(MIB)
        assert await both_ways(reader, writer, data) == data
        assert found == ["127.0.0.2"]
        public = door._callers[seen_ports[0]].writer.get_extra_info("socket")
        assert public.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert public.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert door.connections == 1
        writer.close()
        await until(lambda: door.connections == 0)
        assert door.address_of(seen_ports[0]) is None
        with pytest.raises(ssl.SSLCertVerificationError) as error:
            await dial(port, ssl=client, server_hostname=tls.peer_name("p"))
        assert error.value.verify_code == 62, "OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH"
        stranger = tls_context(tls.new_authority().issue_with_key("p"), server=False)
        with pytest.raises(ssl.SSLCertVerificationError) as error:
            await dial(port, ssl=stranger, server_hostname=name)
        assert error.value.verify_code != 62, "another authority, whatever the name"
        assert not door.refused


@in_loop
async def test_grpc_goes_through_the_door(authority):
    async def who(request, context):
        door.known(int(context.peer().rpartition(":")[2]))
        return f"{request.decode()} from {door.address_of(int(context.peer().rpartition(':')[2]))}".encode()

    identity = authority.issue_with_key(tls.COORDINATOR_NAME)
    server = grpc.aio.server()
    handlers = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Door", handlers),))
    credentials = grpc.ssl_server_credentials([(identity.key_pem, identity.certificate_pem)])
    backend_port = server.add_secure_port(f"{HERE}:0", credentials)
    await server.start()
    async with a_door(authority, backend_port) as (door, port):
        root = await fetch_authority(link_to(port, authority), 5)
        options = [("grpc.ssl_target_name_override", tls.COORDINATOR_NAME)]
        async with grpc.aio.secure_channel(f"{HERE}:{port}", grpc.ssl_channel_credentials(root), options) as channel:
            call = channel.unary_unary("/test.Door/Who")
            assert await call(b"call", timeout=PATIENCE) == b"call from 127.0.0.1"
            await asyncio.sleep(1.5 * QUICK.handshake_seconds)
            assert await call(b"again", timeout=PATIENCE) == b"again from 127.0.0.1"
        other = grpc.ssl_channel_credentials(tls.new_authority().certificate_pem)
        async with grpc.aio.secure_channel(f"{HERE}:{port}", other, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
                await channel.unary_unary("/test.Door/Who")(b"call", timeout=PATIENCE)
    await server.stop(None)


@in_loop
async def test_a_backend_that_is_not_there(authority):
    with socket.create_server((HERE, 0)) as free:
        backend_port = free.getsockname()[1]
    async with a_door(authority, backend_port) as (door, port):
        assert await answer_to(port, HELLO) == b""
        assert door.refused == {"backend_unavailable": 1}


@in_loop
async def test_a_handshake_has_a_limit_in_bytes(authority):
    received = bytearray()

    async def silent(reader, writer):
        while data := await reader.read(65536):
            received.extend(data)

    unhurried = replace(QUICK, handshake_seconds=PATIENCE)
    async with a_server(silent) as backend_port, a_door(authority, backend_port, unhurried) as (door, port):
        reader, writer = await dial(port, HELLO)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"x" * 4096)
                await writer.drain()
        assert await to_the_end(reader) == b""
        assert door.refused == {"handshake_too_long": 1}
        assert len(received) <= QUICK.handshake_bytes


@pytest.mark.parametrize("answer", [b"", b"alert"])
@in_loop
async def test_a_handshake_has_a_limit_in_time(authority, answer):
    """Whether or not the server has answered: until the client replies to that, the clock runs."""

    async def slow(reader, writer):
        writer.write(answer)
        await to_the_end(reader)

    async with a_server(slow) as backend_port, a_door(authority, backend_port) as (door, port):
        began = time.monotonic()
        assert await answer_to(port, HELLO) == answer
        assert time.monotonic() - began > QUICK.handshake_seconds * 0.9
        assert door.refused == {"handshake_too_slow": 1}


@in_loop
async def test_a_slow_reader_slows_the_sender_down(authority):
    """The door must not take in what the backend does not take off its hands."""
    read_on = asyncio.Event()
    received = 0

    async def lazy(reader, writer):
        nonlocal received
        received = len(await reader.readexactly(len(HELLO)))
        door.known(writer.get_extra_info("peername")[1])
        writer.write(b"hello")
        await read_on.wait()
        while data := await reader.read(MIB):
            received += len(data)
        writer.write(b"all")

    async with a_server(lazy) as backend_port, a_door(authority, backend_port) as (door, port):
        reader, writer = await dial(port, HELLO)
        await reader.readexactly(5)
        total, sent = 96, 0
        with contextlib.suppress(TimeoutError):
            while sent < total:
                writer.write(bytes(MIB))
                sent += 1
                await asyncio.wait_for(writer.drain(), 0.5)
        assert 0 < sent < total, "the kernel's buffers hold some 20 MB, the rest went into the door's memory"
        read_on.set()
        await writer.drain()
        writer.write_eof()
        assert await reader.read() == b"all"  # a half-close passes through, and the answer comes back after it
        assert received == len(HELLO) + sent * MIB


# --- strangers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "unknown_request"),
        (b"PMTRAIN 2 CA\n", "unknown_request"),
        (b"PMTRAIN 1 RELAY\n", "unknown_request"),
        (b"PMTRAIN 1 RELAY bad!ticket accept\n", "unknown_request"),
        (b"PMTRAIN 1 RELAY a-ticket_1 both\n", "unknown_request"),
        (b"PMTRAIN 1 RELAY " + b"t" * 161 + b" dial\n", "unknown_request"),
        (b"\n\n", "unknown_request"),
        (b"\x15\x03\x01\x00\x02\x02\x28\n", "unknown_request"),  # TLS, but not its beginning
        (b"P" * 256, "line_too_long"),
        (b"P" * 100_000, "line_too_long"),
        (b"", "no_request"),
        (b"\x16", "no_request"),
        (b"PMTRAIN 1 C", "no_request"),
    ],
)
@in_loop
async def test_whoever_speaks_otherwise_is_cut_without_a_word(authority, says, reason):
    async with a_door(authority) as (door, port):
        door.allow(TICKET)
        assert await answer_to(port, says) == b""
        assert door.refused == {reason: 1}
        await until(lambda: door.connections == 0)


@in_loop
async def test_one_byte_at_a_time_gains_no_time(authority):
    async with a_door(authority) as (door, port):
        reader, writer = await dial(port)
        began = time.monotonic()

        async def trickle():
            for byte in b"PMTRAIN 1 CA and so on":
                writer.write(bytes([byte]))
                await asyncio.sleep(0.6)

        trickling = asyncio.create_task(trickle())
        assert await to_the_end(reader) == b""
        assert time.monotonic() - began < 10, "all of them take 13 s"
        assert door.refused == {"no_request": 1}
        trickling.cancel()


@contextlib.asynccontextmanager
async def a_crowd(authority, limits):
    """A door, and a way to connect to it as somebody who turns out to be known."""
    ports = []

    async def backend(reader, writer):
        ports.append(writer.get_extra_info("peername")[1])
        await to_the_end(reader)

    async with a_server(backend) as backend_port, a_door(authority, backend_port, limits) as (door, port):

        async def known(source):
            before = len(ports)
            stream = await dial(port, HELLO, source)
            await until(lambda: len(ports) > before)
            door.known(ports[-1])
            return stream

        yield door, port, known


def test_strangers_make_way_those_that_were_silent_longest_first():
    """A handshake that makes progress is finished, however many come meanwhile and say nothing."""
    for crowd in ("one network", "a network each"):
        kept = Admission(DoorLimits(connections=48, connections_per_address=12), 48)
        networks = {"one network": ["a"], "a network each": [*"abcdefghijkl"]}[crowd]
        honest = kept.come("honest" if crowd == "a network each" else "a", 0.0).number
        left = []
        for i in range(30):
            left.append(kept.come(networks[i % len(networks)], float(i)).instead_of)
            kept.heard(honest)
        assert honest not in left
        assert [number for number in left if number] == [*range(honest + 1, honest + 1 + 30 - left.count(None))]


def test_a_known_caller_makes_way_that_was_served_a_while_ago_and_has_no_session():
    kept = Admission(DoorLimits(connections=64, connections_per_address=4), 64)
    callers = []
    for served in (0.0, 1.0, 2.0, 2.0):
        callers.append(kept.come("home", served).number)
        kept.known(callers[-1], served)
    session, idle, was_served, other = callers
    kept.busy(session)
    assert kept.come("home", 10.9) == "too_many_from_one_address", "all of them may wait for an answer"
    newcomer = kept.come("home", 11.0)
    assert newcomer.instead_of == idle
    assert kept.come("home", 11.1).instead_of == newcomer.number, "a stranger, where nobody is idle for so long"
    kept.idle(session, 20.0)
    left = [kept.come("home", now).instead_of for now in (29.0, 29.5, 30.0)]
    assert left[:2] == [was_served, other]
    assert left[2] == session, "its session has ended a while ago"
    for number in list(kept._networks):
        kept.go(number)
    assert [*kept._networks, *kept._by_network, *kept._strangers, *kept._idle, kept._strange] == [0]


@needs_two_addresses
@in_loop
async def test_strangers_make_way_the_oldest_of_the_largest_crowd_first(authority):
    limits = DoorLimits(connections=48, connections_per_address=12)  # room for 6 strangers, 3 of each address
    async with a_crowd(authority, limits) as (door, port, known):
        friend = await known("127.0.0.2")
        crowd = [await dial(port, source="127.0.0.2") for _ in range(3)]
        await until(lambda: door.connections == 4)
        crowd.append(await dial(port, source="127.0.0.2"))
        assert await to_the_end(crowd[0][0]) == b"", "the fourth came in place of the first"
        crowd += [await dial(port, source=f"127.0.0.{n}") for n in (3, 4, 5)]
        await until(lambda: door.connections == 7)
        crowd.append(await dial(port, source="127.0.0.6"))
        assert await to_the_end(crowd[1][0]) == b"", "there is room for six strangers: one of the largest crowd goes"
        assert await fetch_authority(link_to(port, authority), 5) == authority.certificate_pem
        assert door.refused == {"made_way": 3}
        assert not friend[0].at_eof(), "whoever is known stays"
        for _, writer in (friend, *crowd):
            writer.close()
        await until(lambda: door.connections == 0)
        kept = door._admission
        left = [*kept._networks, *kept._by_network, *kept._strangers, *kept._idle]
        assert left == [], "addresses do not pile up"


@needs_two_addresses
@in_loop
async def test_known_callers_cannot_take_all_the_room_from_one_address(authority):
    async with a_crowd(authority, DoorLimits(connections=5, connections_per_address=3, line_seconds=0.0)) as (
        door,
        port,
        known,
    ):
        friends = [await known(HERE) for _ in range(3)]
        with pytest.raises(UnreachableError) as error:
            await fetch_authority(link_to(port, authority), 5)
        assert error.value.kind == "too_many_from_one_address"
        assert door.refused == {"too_many_from_one_address": 1}
        assert await answer_to(port, HELLO) == b"", "nothing can be said within TLS"
        assert await answer_to(port, b"PMTRAIN 1 CA\n", "127.0.0.2") == authority.certificate_pem
        friends += [await known(f"127.0.0.{n}") for n in (3, 4)]
        assert await answer_to(port, b"PMTRAIN 1 CA\n", "127.0.0.5") == refusal("too_many_connections")
        assert door.refused["too_many_connections"] == 1
        silent = [await dial(port, source=f"127.0.1.{n}") for n in range(1, doors.MOST_WAITING + 2)]
        assert await to_the_end(silent[-1][0]) == b"", "only so many are listened to, to be told"
        for _, writer in friends:
            writer.close()
        await until(lambda: door.connections == 0)
        assert await fetch_authority(link_to(port, authority), 5) == authority.certificate_pem


@in_loop
async def test_one_address_cannot_come_again_and_again(authority):
    async with a_door(authority, limits=DoorLimits(connections_per_address=4, line_seconds=0.0)) as (_, port):
        answers = [await answer_to(port, b"PMTRAIN 1 CA\n") for _ in range(20)]
        assert answers[:8] == [authority.certificate_pem] * 8
        assert answers[-1] == refusal("too_many_from_one_address")
        await asyncio.sleep(1.1)
        assert await answer_to(port, b"PMTRAIN 1 CA\n") == authority.certificate_pem, "one a second comes back"


@in_loop
async def test_a_stranger_has_a_limit_in_bytes_and_time_until_it_is_known(authority):
    ports, received = [], []

    async def backend(reader, writer):
        ports.append(writer.get_extra_info("peername")[1])
        writer.write(b"answer")
        received.append(0)
        while data := await reader.read(65536):
            received[-1] += len(data)

    async def send_more(writer):
        writer.write(b"x" * 1_000_000)
        await writer.drain()

    async def shaken(port):
        reader, writer = await dial(port, HELLO)
        await reader.readexactly(6)
        writer.write(b"reply")
        return reader, writer

    hurried = DoorLimits(stranger_seconds=0.5)
    async with a_server(backend) as backend_port, a_door(authority, backend_port, hurried) as (door, port):
        began = time.monotonic()
        assert await to_the_end((await shaken(port))[0]) == b""
        assert time.monotonic() - began > 0.4
        assert door.refused == {"stranger_too_long": 1}

    limits = DoorLimits(stranger_seconds=3.0, stranger_bytes=5_000, stranger_most_bytes=40_000)
    async with a_server(backend) as backend_port, a_door(authority, backend_port, limits) as (door, port):
        reader, writer = await shaken(port)
        writer.write(b"x" * 40_000)
        assert await to_the_end(reader) == b""
        assert door.refused["stranger_too_much"] == 1
        reader, writer = await shaken(port)
        writer.write(b"x" * 20_000)
        await asyncio.sleep(0.1)
        more = asyncio.create_task(send_more(writer))
        await asyncio.sleep(0.1)
        assert received[-1] <= 30_000, "no more is read"
        door.known(ports[-1])
        await more
        await until(lambda: received[-1] > 1_000_000, "and then all of it")
        await asyncio.sleep(limits.stranger_seconds + 0.1)
        assert door.connections == 1
        assert not reader.at_eof()


def test_an_ipv6_household_counts_as_one():
    callers = [doors._plain_ip(host) for host in ("::ffff:192.0.2.7", "2001:db8::1", "2001:db8::ff:1", "fe80::1%eth0")]
    assert callers == ["192.0.2.7", "2001:db8::1", "2001:db8::ff:1", "fe80::1"]
    assert len({doors.network_of(caller) for caller in callers}) == 3
    assert doors.network_of("192.0.2.7") != doors.network_of("192.0.2.8")


@pytest.mark.parametrize(
    ("soft", "hard", "room"), [(256, 1 << 20, 1000), (256, 1756, 500), (256, 256, 1), (-1, -1, 1000), (256, -1, 1000)]
)
def test_the_door_leaves_file_descriptors_to_others(monkeypatch, soft, hard, room):
    """Three a connection, and 256 for the journal and the rest."""
    asked = []
    monkeypatch.setattr(doors.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(doors.resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert doors._room_for(1000) == room
    assert asked == ([] if soft == -1 else [(min(3256, hard) if hard != -1 else 3256, hard)])


@in_loop
async def test_a_taken_port_is_named(authority):
    async with a_door(authority) as (_, port):
        with pytest.raises(UserError, match=rf"127.0.0.1:{port}") as error:
            await Door(authority.certificate_pem, (HERE, 1)).open(HERE, port)
        assert (error.value.kind, error.value.exit_code) == ("port_taken", EXIT_OUTSIDE)
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(UserError, match=host) as error:
            await Door(authority.certificate_pem, (HERE, 1)).open(host, 0)
        assert error.value.kind == "no_such_address"


@in_loop
async def test_closing_the_door_cuts_everyone_and_frees_the_port(authority):
    async with a_server(echo) as backend_port, a_door(authority, backend_port, DoorLimits()) as (door, port):
        door.allow(TICKET)
        streams = [await dial(port, says) for says in (b"", HELLO, b"PMTRAIN 1 RELAY a-ticket_1 dial\n")]
        await until(lambda: door.connections == 3)
        await door.close()
        assert door.connections == 0
        for reader, _ in streams:
            await to_the_end(reader)
        again = Door(authority.certificate_pem, (HERE, 1))
        assert await again.open(HERE, port) == port
        await again.close()
