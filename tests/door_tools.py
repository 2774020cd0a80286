"""Sockets, TLS and a door for tests: Python's own TLS as the oracle, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import sys
import tempfile

import pytest
from waiting import PATIENCE

from protomodels_cli.coordinator.door import Door, DoorLimits
from protomodels_cli.wire import tls
from protomodels_cli.wire.join_link import (
    JoinLink,
    new_token,
)

HERE = "127.0.0.1"
QUICK = DoorLimits(first_seconds=1.0, handshake_seconds=1.0, relay_seconds=1.0)
HELLO = b"\x16\x03\x01\x02\x00"  # how a TLS client begins
TICKET = "a-ticket_1"
MIB = 1024 * 1024
DIALLED: list[asyncio.StreamWriter] = []  # also because a stream that nobody holds closes itself
needs_two_addresses = pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers to all of 127.0.0.0/8")


def in_loop(test):
    """A coroutine as a test, with an end to its patience; hangs up what the test has dialled."""

    async def all_of_it(*args, **kwargs):
        try:
            await asyncio.wait_for(test(*args, **kwargs), PATIENCE)
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


async def both_ways(reader, writer, data: bytes) -> bytes:
    """Send to an echo and return what comes back."""

    async def send():
        writer.write(data)
        await writer.drain()

    return (await asyncio.gather(reader.readexactly(len(data)), send()))[0]


def link_to(port, authority, host=HERE) -> JoinLink:
    return JoinLink(host, port, new_token(), authority.fingerprint)
