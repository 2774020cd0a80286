"""The public port, the join link and the run's CA: real sockets, real TLS, real gRPC, and bad company."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import os
import secrets
import socket
import ssl
import stat
import struct
import sys
import tempfile
import time
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.coordinator import door as doors
from protomodels_cli.coordinator.door import Door, DoorLimits
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, EXIT_SPEC, UserError
from protomodels_cli.wire import relay as relays
from protomodels_cli.wire import tls
from protomodels_cli.wire.link import (
    FingerprintError,
    JoinLink,
    LinkError,
    UnreachableError,
    fetch_authority,
    new_token,
)
from protomodels_cli.wire.relay import RelayedAcceptor, RelayedDialler, RelayError, dial_relay
from protomodels_cli.wire.splice import splice

HERE = "127.0.0.1"
QUICK = DoorLimits(first_seconds=0.3, handshake_seconds=0.3, relay_seconds=0.3)
HELLO = b"\x16\x03\x01\x02\x00"  # how a TLS client begins
TICKET = "a-ticket_1"
MIB = 1024 * 1024
DIALLED: list[asyncio.StreamWriter] = []  # also because a stream that nobody holds closes itself
needs_two_addresses = pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers to all of 127.0.0.0/8")


@pytest.fixture(scope="module")
def authority() -> tls.Authority:
    return tls.new_authority()


def in_loop(test):
    """A coroutine as a test, with an end to its patience; hangs up what the test has dialled."""

    async def all_of_it(*args, **kwargs):
        try:
            await asyncio.wait_for(test(*args, **kwargs), 20)
        finally:
            for writer in DIALLED:
                writer.transport.abort()
            DIALLED.clear()
            await asyncio.sleep(0)

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(all_of_it(*args, **kwargs))

    return run


@contextlib.asynccontextmanager
async def a_door(authority, backend_port=1, limits=QUICK):
    door = Door(authority.certificate_pem, (HERE, backend_port), limits)
    port = await door.open(HERE, 0)
    try:
        yield door, port
    finally:
        await door.close()


@contextlib.asynccontextmanager
async def a_server(handle, context=None):
    """A server on loopback; `handle(reader, writer)` may fail as it likes."""
    tasks = set()

    async def serve(reader, writer):
        try:
            with contextlib.suppress(OSError):
                await handle(reader, writer)
        finally:
            writer.close()

    def come_in(reader, writer):
        tasks.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(come_in, HERE, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def tls_context(identity: tls.Identity, server: bool) -> ssl.SSLContext:
    """Python's own TLS as the oracle: trusts the run's CA and nothing else; both sides show a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    context.load_verify_locations(cadata=identity.authority_pem.decode())
    with tempfile.NamedTemporaryFile() as file:
        file.write(identity.key_pem + identity.certificate_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


async def dial(port, says=b"", source=None, **tls_options):
    local = (source, 0) if source else None
    reader, writer = await asyncio.open_connection(HERE, port, local_addr=local, **tls_options)
    DIALLED.append(writer)
    writer.write(says)
    return reader, writer


async def to_the_end(reader) -> bytes:
    """What comes until the other side closes, in whichever way it does."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(65536):
            data += chunk
    return data


async def answer_to(port, says, source=None) -> bytes:
    return await to_the_end((await dial(port, says, source))[0])


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


async def both_ways(reader, writer, data: bytes) -> bytes:
    """Send to an echo and return what comes back."""

    async def send():
        writer.write(data)
        await writer.drain()

    return (await asyncio.gather(reader.readexactly(len(data)), send()))[0]


# --- the link ---------------------------------------------------------------------------------------------------

CODES = st.text("abcxyzABCXYZ0189-_", min_size=43, max_size=43)
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z0-9]+(-[a-z]+)?(\.[a-z]{2,9}){0,3}", fullmatch=True),
)
GOOD = "pm://example.org:7070/" + "t" * 22 + "#" + "f" * 43


@given(HOSTS, st.integers(1, 65535), CODES, CODES, st.sampled_from(["{}", " {}\n", "'{}'", '"{}"', "<{}>", "“{}”"]))
def test_a_link_survives_being_printed_and_pasted(host, port, token, fingerprint, pasted):
    link = JoinLink(host, port, token[:22], fingerprint)
    assert JoinLink.parse(pasted.format(link)) == link


def test_a_link_is_written_as_promised():
    assert str(JoinLink("example.org", 7070, "t" * 22, "f" * 43)) == GOOD
    assert str(JoinLink("2001:db8::1", 1, "t" * 22, "f" * 43)).startswith("pm://[2001:db8::1]:1/")
    assert "t" * 22 not in repr(JoinLink.parse(GOOD))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("''", "it is empty"),
        (GOOD.replace("pm://", ""), "begins with 'examp'"),
        (GOOD.replace("pm:", "https:"), "not with pm://"),
        (GOOD.replace("example.org", ""), "host is missing"),
        (GOOD.replace("example.org", "exa$mple"), r"host 'exa\$mple'"),
        (GOOD.replace("example.org", "-o"), "host '-o'"),
        (GOOD.replace("example.org", "2001:db8::1"), "IPv6 address in brackets"),
        (GOOD.replace("example.org", "[2001:db8::1"), "does not close"),
        (GOOD.replace("example.org", "[2001:db8:::1]"), "not an IPv6 address"),
        (GOOD.replace("example.org", "[fe80::1%eth0]"), "network card"),
        (GOOD.replace(":7070", ""), "port is missing"),
        (GOOD.replace("7070", "http"), "port is 'http'"),
        (GOOD.replace("7070", "70700"), "port is 70700"),
        (GOOD.replace("7070", "0"), "port is 0"),
        (GOOD.replace("7070", "٧٠"), "port is"),
        ("pm://example.org:7070", "token is missing"),
        (GOOD.replace("t" * 22, ""), "token is missing"),
        (GOOD.replace("t" * 22, "t" * 12), "token has 12 characters instead of 22"),
        (GOOD.replace("tt", "t/t", 1), "token has a character"),
        (GOOD.partition("#")[0], "shell may take # for the start of a comment"),
        (GOOD.partition("#")[0] + "#", "fingerprint is missing"),
        (GOOD[:-1], "fingerprint has 42 characters instead of 43"),
        (GOOD + ".", "fingerprint has a character"),
        (GOOD[:30] + "\n" + GOOD[30:], "on one line"),
        (GOOD[:30] + " " + GOOD[30:], "space or a line break"),
        (GOOD + "f" * 600, "far too many"),
    ],
)
def test_broken_links_are_told_which_part_is_broken(text, says):
    with pytest.raises(LinkError, match=says) as error:
        JoinLink.parse(text)
    assert error.value.exit_code == EXIT_SPEC
    assert "pm://HOST:PORT/TOKEN#FINGERPRINT" in str(error.value)
    assert "t" * 22 not in str(error.value)  # errors end up in chats; a token must not


@given(st.text(max_size=80))
def test_no_text_does_worse_than_a_link_error(text):
    for attempt in (text, "pm://" + text, GOOD[:20] + text + GOOD[20:], GOOD.replace("example.org", f"[{text}]")):
        with contextlib.suppress(LinkError):
            JoinLink.parse(attempt)


# --- the certificate authority ----------------------------------------------------------------------------------


def test_the_authority_is_kept_and_its_key_is_nobody_elses(authority, tmp_path, monkeypatch):
    seen, at_first = {}, []

    def watched_replace(source, target, replace=os.replace):
        seen[Path(target).name] = stat.S_IMODE(os.stat(source).st_mode)
        replace(source, target)

    def watched_chmod(file, mode, fchmod=os.fchmod):
        at_first.append(stat.S_IMODE(os.fstat(file).st_mode))
        fchmod(file, mode)

    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(os, "fchmod", watched_chmod)
    before = os.umask(0)  # the least careful user
    try:
        authority.save(tmp_path / "run" / "ca")
    finally:
        os.umask(before)
    folder = tmp_path / "run" / "ca"
    assert seen == {"ca.key": 0o600, "ca.pem": 0o644}
    assert set(at_first) <= {0o600}  # not even between being made and being written
    assert list(seen) == ["ca.key", "ca.pem"]  # where the certificate is, the key is
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["ca.key", "ca.pem"]
    loaded = tls.Authority.load(folder)
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert((folder / "ca.pem").read_text())).digest()
    assert loaded.fingerprint == authority.fingerprint == base64.urlsafe_b64encode(digest).decode().rstrip("=")
    loaded.issue_with_key("x.pmtrain")
    with pytest.raises(UserError, match="has a CA already"):
        tls.new_authority().save(folder)


def test_a_damaged_authority_is_refused_in_words(authority, tmp_path):
    with pytest.raises(UserError, match=r"cannot be used.*ca\.pem") as missing:
        tls.Authority.load(tmp_path)
    assert missing.value.exit_code == EXIT_OUTSIDE
    authority.save(tmp_path)
    (tmp_path / "ca.key").write_bytes(tls.new_key())
    with pytest.raises(UserError, match="not the key of"):
        tls.Authority.load(tmp_path)
    (tmp_path / "ca.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(UserError, match="not a private key"):
        tls.Authority.load(tmp_path)


def test_a_leaf_says_what_it_is_for(authority):
    name = tls.peer_name("peer-7")
    leaf = x509.load_pem_x509_certificate(authority.issue(name, tls.public_key_of(tls.new_key()), days=2))
    leaf.verify_directly_issued_by(authority.certificate)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["peer-7.peer.pmtrain"]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days in (2, 3)
    assert time.time() - leaf.not_valid_before_utc.timestamp() == pytest.approx(86400, abs=60)
    forever = x509.load_pem_x509_certificate(authority.issue(name, tls.public_key_of(tls.new_key()), days=99_999))
    assert forever.not_valid_after_utc == authority.certificate.not_valid_after_utc


@pytest.mark.parametrize("name", ["", "*.peer.pmtrain", "a b", "a..b", "-a", "a\n", "Ä", "a" * 65, "a.pmtrain\x00.b"])
def test_names_that_mean_more_than_one_thing_are_not_certified(authority, name):
    with pytest.raises(ValueError, match="no name for a certificate"):
        authority.issue(name, tls.public_key_of(tls.new_key()), days=1)
    with pytest.raises(ValueError, match="peer id"):
        tls.peer_name(name)
    with pytest.raises(ValueError, match="peer id"):
        tls.peer_name("x.coordinator")


def test_only_p256_keys_are_certified(authority):
    for key in (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)):
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(ValueError, match="P-256"):
            authority.issue("a.pmtrain", pem, days=1)


def pem_block(label: str, body: str) -> bytes:
    return f"-----BEGIN {label}-----\n{body}\n-----END {label}-----\n".encode()


LABELS = ["CERTIFICATE", "PUBLIC KEY", "PRIVATE KEY", "EC PRIVATE KEY", "ENCRYPTED PRIVATE KEY", "RSA PUBLIC KEY"]


@given(
    st.one_of(
        st.binary(max_size=200), st.builds(pem_block, st.sampled_from(LABELS), st.text("AMIGBCb3/+=\n", max_size=99))
    )
)
def test_garbage_in_place_of_pem_is_a_value_error(garbage):
    authority = garbage_authority()
    for parse in (tls.fingerprint_of, tls.one_certificate, tls.public_key_of, lambda pem: authority.issue("a", pem, 1)):
        with pytest.raises(ValueError, match=r"not |expected|P-256"):
            parse(garbage)


garbage_authority = functools.cache(tls.new_authority)


def test_pem_has_a_limit(authority):
    for parse in (tls.fingerprint_of, tls.public_key_of, lambda pem: authority.issue("a", pem, 1)):
        with pytest.raises(ValueError, match="are the most"):
            parse(authority.certificate_pem + b"\n" * 20_000)


# --- fetching the CA --------------------------------------------------------------------------------------------


def link_to(port, authority, host=HERE) -> JoinLink:
    return JoinLink(host, port, new_token(), authority.fingerprint)


@in_loop
async def test_the_door_hands_out_the_authority(authority):
    async with a_door(authority) as (door, port):
        assert await fetch_authority(link_to(port, authority), 5) == authority.certificate_pem
        assert not door.refused


@in_loop
async def test_another_fingerprint_ends_it_before_the_token_is_sent(authority):
    received = []

    async def other_door(reader, writer):
        received.append(await reader.readuntil(b"\n"))
        writer.write(tls.new_authority().certificate_pem)
        writer.write_eof()
        received.append(await to_the_end(reader))

    async with a_server(other_door) as port:
        link = link_to(port, authority)
        with pytest.raises(FingerprintError, match="not the coordinator this link was made by") as error:
            await fetch_authority(link, 5)
        await until(lambda: len(received) == 2)
    assert error.value.exit_code == EXIT_REFUSED
    assert received == [b"PMTRAIN 1 CA\n", b""]
    assert link.token not in str(error.value)


@pytest.mark.parametrize("order", [1, -1])
@in_loop
async def test_a_second_certificate_does_not_slip_in_beside_the_right_one(authority, order):
    """gRPC would trust both: whoever sits in between could add its own."""
    answer = b"".join([authority.certificate_pem, tls.new_authority().certificate_pem][::order])

    async def in_between(reader, writer):
        await reader.readline()
        writer.write(answer)

    async with a_server(in_between) as port:
        with pytest.raises(UnreachableError, match="no pmtrain coordinator"):
            await fetch_authority(link_to(port, authority), 5)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answers, but is no pmtrain coordinator"),
        (b"", "hung up without a word"),
        (b"x" * MIB, "answers, but is no pmtrain coordinator"),
        (None, r"no answer from 127.0.0.1:\d+ within 0.2 s"),
    ],
)
@in_loop
async def test_something_else_at_the_address(authority, answer, says):
    async def something_else(reader, writer):
        if answer is None:
            await asyncio.sleep(60)
        if answer != b"":  # with nothing to say it hangs up on what it has not even read
            await reader.readline()
        writer.write(answer)
        while len(answer) == MIB:  # never stops
            writer.write(answer)
            await writer.drain()

    async with a_server(something_else) as port:
        with pytest.raises(UnreachableError, match=says) as error:
            await fetch_authority(link_to(port, authority), 0.2 if answer is None else 5)
    assert error.value.exit_code == EXIT_OUTSIDE
    assert f":{port}" in str(error.value)


@in_loop
async def test_nobody_at_the_address(authority):
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"nothing listens at 127.0.0.1:{port}"):
        await fetch_authority(link_to(port, authority), 5)
    with pytest.raises(UnreachableError, match=r"no host 'no-such-host\.invalid'"):
        await fetch_authority(link_to(port, authority, "no-such-host.invalid"), 5)


# --- TLS through the door ---------------------------------------------------------------------------------------


@needs_two_addresses
@in_loop
async def test_tls_goes_through_to_the_backend_and_the_caller_is_known(authority):
    """With limits that the connection outlives, in time and in bytes, once its handshake is over."""
    found, seen_ports = [], []

    async def backend(reader, writer):
        seen_ports.append(writer.get_extra_info("peername")[1])
        found.append(door.address_of(seen_ports[-1]))
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
        public = door._callers[seen_ports[0]][1].get_extra_info("socket")
        assert public.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert public.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert door.connections == 1
        writer.close()
        await until(lambda: door.connections == 0)
        assert door.address_of(seen_ports[0]) is None
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            await dial(port, ssl=client, server_hostname=tls.peer_name("p"))
        stranger = tls_context(tls.new_authority().issue_with_key("p"), server=False)
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
            await dial(port, ssl=stranger, server_hostname=name)
        assert not door.refused


@in_loop
async def test_grpc_goes_through_the_door(authority):
    async def who(request, context):
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
            assert await call(b"call", timeout=5) == b"call from 127.0.0.1"
            await asyncio.sleep(1.5 * QUICK.handshake_seconds)
            assert await call(b"again", timeout=5) == b"again from 127.0.0.1"
        other = grpc.ssl_channel_credentials(tls.new_authority().certificate_pem)
        async with grpc.aio.secure_channel(f"{HERE}:{port}", other, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
                await channel.unary_unary("/test.Door/Who")(b"call", timeout=5)
    await server.stop(None)


@in_loop
async def test_a_backend_that_is_not_there(authority):
    with socket.create_server((HERE, 0)) as free:
        backend_port = free.getsockname()[1]
    async with a_door(authority, backend_port) as (door, port):
        assert await answer_to(port, HELLO) == b""
        assert door.refused == {"backend not there": 1}


@in_loop
async def test_a_handshake_has_a_limit_in_bytes(authority):
    received = bytearray()

    async def silent(reader, writer):
        while data := await reader.read(65536):
            received.extend(data)

    async with a_server(silent) as backend_port, a_door(authority, backend_port) as (door, port):
        reader, writer = await dial(port, HELLO)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"x" * 4096)
                await writer.drain()
        assert await to_the_end(reader) == b""
        assert door.refused == {"handshake too long": 1}
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
        assert QUICK.handshake_seconds * 0.9 < time.monotonic() - began < 5
        assert door.refused == {"handshake too slow": 1}


@in_loop
async def test_a_slow_reader_slows_the_sender_down(authority):
    """The door must not take in what the backend does not take off its hands."""
    read_on = asyncio.Event()
    received = 0

    async def lazy(reader, writer):
        nonlocal received
        writer.write(b"hello")
        await read_on.wait()
        while data := await reader.read(MIB):
            received += len(data)
        writer.write(b"all")

    async with a_server(lazy) as backend_port, a_door(authority, backend_port) as (_, port):
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
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "garbage"),
        (b"PMTRAIN 2 CA\n", "garbage"),
        (b"PMTRAIN 1 RELAY\n", "garbage"),
        (b"PMTRAIN 1 RELAY bad!ticket accept\n", "garbage"),
        (b"PMTRAIN 1 RELAY a-ticket_1 both\n", "garbage"),
        (b"PMTRAIN 1 RELAY " + b"t" * 65 + b" dial\n", "garbage"),
        (b"\n\n", "garbage"),
        (b"\x15\x03\x01\x00\x02\x02\x28\n", "garbage"),  # TLS, but not its beginning
        (b"P" * 256, "line too long"),
        (b"P" * 100_000, "line too long"),
        (b"", "said nothing"),
        (b"\x16", "said nothing"),
        (b"PMTRAIN 1 C", "said nothing"),
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
                await asyncio.sleep(0.1)

        trickling = asyncio.create_task(trickle())
        assert await to_the_end(reader) == b""
        assert time.monotonic() - began < 1.5
        assert door.refused == {"said nothing": 1}
        trickling.cancel()


@needs_two_addresses
@in_loop
async def test_one_address_cannot_take_all_the_room(authority):
    limits = DoorLimits(connections=5, connections_per_address=3)
    async with a_door(authority, limits=limits) as (door, port):
        crowd = [await dial(port) for _ in range(3)]
        await until(lambda: door.connections == 3)
        assert await answer_to(port, b"PMTRAIN 1 CA\n") == b""
        assert door.refused == {"too many connections from one address": 1}
        assert await answer_to(port, b"PMTRAIN 1 CA\n", "127.0.0.2") == authority.certificate_pem
        await until(lambda: door.connections == 3)
        crowd += [await dial(port, source=f"127.0.0.{n}") for n in (3, 4)]
        await until(lambda: door.connections == 5)
        assert await answer_to(port, b"PMTRAIN 1 CA\n", "127.0.0.5") == b""
        assert door.refused["too many connections"] == 1
        for _, writer in crowd:
            writer.close()
        await until(lambda: door.connections == 0)
        assert await fetch_authority(link_to(port, authority), 5) == authority.certificate_pem
        await until(lambda: not door._by_neighbourhood)  # an attacker's addresses do not pile up


def test_an_ipv6_household_counts_as_one():
    callers = [doors._plain_ip(host) for host in ("::ffff:192.0.2.7", "2001:db8::1", "2001:db8::ff:1", "fe80::1%eth0")]
    assert callers == ["192.0.2.7", "2001:db8::1", "2001:db8::ff:1", "fe80::1"]
    assert len({doors._neighbourhood(caller) for caller in callers}) == 3
    assert doors._neighbourhood("192.0.2.7") != doors._neighbourhood("192.0.2.8")


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
        with pytest.raises(UserError, match=rf"127.0.0.1:{port}.*taken(.|\n)*another port") as error:
            await Door(authority.certificate_pem, (HERE, 1)).open(HERE, port)
        assert error.value.exit_code == EXIT_OUTSIDE
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(UserError, match=rf"no address {host}"):
            await Door(authority.certificate_pem, (HERE, 1)).open(host, 0)


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


# --- the relay --------------------------------------------------------------------------------------------------


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
        assert "ticket is not valid" in acceptor.problem
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await transfer(1)
        assert "ticket is not valid" in dialler.problem
        door.allow(TICKET)
        await transfer(1000)
        await acceptor.close()
        await dialler.close()
        await until(lambda: door.connections == 0)


@in_loop
async def test_an_acceptor_waits_for_its_relay_to_come_back(authority, monkeypatch):
    monkeypatch.setattr(relays, "FIRST_PAUSE", 0.01)
    async with a_server(echo) as target_port:
        async with a_door(authority) as (_, port):
            pass
        acceptor = RelayedAcceptor((HERE, port), TICKET, (HERE, target_port))
        acceptor.start()
        await until(lambda: acceptor.problem is not None)
        assert f"relay 127.0.0.1 port {port}" in acceptor.problem
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
        with pytest.raises(RelayError, match="ticket is not valid") as error:
            await dial_relay(HERE, port, TICKET, "dial")
        assert error.value.exit_code == EXIT_REFUSED
        assert door.refused == {"unknown ticket": 1}
        assert await answer_to(port, b"PMTRAIN 1 RELAY a-ticket_1 accept\n") == b"UNKNOWN\n"
        door.allow(TICKET)
        waits = asyncio.create_task(answer_to(port, b"PMTRAIN 1 RELAY a-ticket_1 accept\n"))
        await until(lambda: door._meetings._waiting)
        door.forbid(TICKET)
        assert await waits == b"UNKNOWN\n"
        for bad in ("", "a b", "a\n", "t" * 65):
            with pytest.raises(ValueError, match="a ticket has"):
                door.allow(bad)
            with pytest.raises(ValueError, match="a ticket has"):
                await dial_relay(HERE, port, bad, "dial")
            with pytest.raises(ValueError, match="a ticket has"):
                RelayedAcceptor((HERE, port), bad, (HERE, port))


@in_loop
async def test_who_waits_alone_is_told_so(authority):
    async with a_door(authority) as (door, port):
        door.allow(TICKET)
        began = time.monotonic()
        with pytest.raises(RelayError, match="the other peer did not come"):
            await dial_relay(HERE, port, TICKET, "dial")
        assert QUICK.relay_seconds * 0.9 < time.monotonic() - began < 5
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
        await until(lambda: door._meetings._waiting)
        if rudely:  # a reset instead of a goodbye
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        with pytest.raises(RelayError, match="did not come"):
            await dial_relay(HERE, port, TICKET, "dial")


@in_loop
async def test_splice_counts_and_does_not_wait_for_the_dead():
    """One side has finished and the other says nothing and does not leave: that ends after a while."""
    ends = asyncio.Queue()

    async def hand_over(reader, writer):
        ends.put_nowait((reader, writer))
        await asyncio.sleep(60)

    async with a_server(hand_over) as port:
        a = await dial(port, b"12345")
        a_far = await ends.get()
        b = await dial(port, b"123")
        b_far = await ends.get()
        splicing = asyncio.create_task(splice(a_far, b_far, linger=0.2))
        assert await b[0].readexactly(5) == b"12345"
        a[1].write_eof()
        assert await b[0].read() == b""
        assert await asyncio.wait_for(splicing, 5) == (5, 3)
        assert await to_the_end(b[0]) == b""
