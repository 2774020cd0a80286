"""A TCP connection between two machines whose routers let nobody in: both connect at the same moment, each from the
port at which the other expects it, and to either router the other's packets look like answers.

Knows sockets. It must not know who the other machine is: TLS runs over what comes of it, as over a relay.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protomodels_cli.wire.cap import Cap, carry_under
from protomodels_cli.wire.join_link import Address
from protomodels_cli.wire.seen import shared_port
from protomodels_cli.wire.splice import Stream, tune

PAUSE = 0.05, 0.15  # seconds after a refusal: the other end was not there yet


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def open_together(port: int, to: Address, seconds: float) -> Stream:
    """Connect from this local port while the other end connects to it. Raises TimeoutError."""
    loop, family = asyncio.get_running_loop(), family_of(to[0])
    won: list[socket.socket] = []

    async def dial() -> None:
        while True:
            try:
                made = shared_port(family, port)
            except OSError:  # for as long as a connection that failed is remembered
                await asyncio.sleep(random.uniform(*PAUSE))
                continue
            try:
                await loop.sock_connect(made, to)
                won.append(made)
                return
            except OSError:
                made.close()
                await asyncio.sleep(random.uniform(*PAUSE))
            except BaseException:
                made.close()
                raise

    async def accept(waiting: socket.socket) -> None:
        """Where the other's first packet comes before ours has left, or there is no router at all."""
        while True:
            made, where = await loop.sock_accept(waiting)
            if where[0] == to[0]:
                won.append(made)
                return
            made.close()

    try:
        with shared_port(family, port) as waiting:
            waiting.listen(1)
            tries = [asyncio.ensure_future(dial()), asyncio.ensure_future(accept(waiting))]
            try:
                await asyncio.wait(tries, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in tries:
                    one.cancel()
                await asyncio.gather(*tries, return_exceptions=True)
        if not won:
            raise TimeoutError
        reader, writer = await asyncio.open_connection(sock=won[0])
    except BaseException:
        for made in won:
            made.close()
        raise
    for other in won[1:]:
        other.close()
    tune(writer)
    return reader, writer


@asynccontextmanager
async def port_to(stream: Stream, cap: Cap | None = None) -> AsyncIterator[int]:
    """A port on loopback whose first connection goes on over this stream, for gRPC, which dials by itself; the stream
    ends with the block."""
    came: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    def come_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if came.done():
            writer.transport.abort()
        else:
            came.set_result((reader, writer))

    async def carry() -> None:
        local = await came
        tune(local[1])
        await carry_under(cap, local, stream)

    server = await asyncio.start_server(come_in, "127.0.0.1", 0)
    carrying = asyncio.create_task(carry())
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
        stream[1].transport.abort()
        if came.done() and not came.cancelled():
            came.result()[1].transport.abort()
