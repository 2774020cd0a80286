"""All attacks on a coordinator's port at once, in a process of its own, until its input ends; then it says what it did.

python -m protomodels_cli.bench.attack '{"port": 7420, "token": …, "request": …, …}'
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count

from protomodels_cli.bench import strangers
from protomodels_cli.bench.strangers import ENROL, Http2, loopback_addresses, tls_to

READY = "ready"
ADDRESSES = 64
ENROLLING = 16  # addresses from which one token is used
HALF_SENT = 40  # connections, of 16 calls each
AT_ONCE = 16  # handshakes
SIZE = 128 << 10  # that is sent of a message of twice as many bytes


@dataclass(frozen=True)
class Order:
    port: int
    token: str
    request: str  # of an enrolment, in hexadecimal digits
    connections: int  # that say nothing
    slow: int  # that say a byte a second
    per_second: float  # messages that are none


class Attack:
    def __init__(self, order: Order):
        self._order, self._where = order, ("127.0.0.1", order.port)
        self._sources, self._draw = loopback_addresses(ADDRESSES), random.Random(18)
        self._numbers, self._shaking = count(), asyncio.Semaphore(AT_ONCE)  # of those that only hold connections
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        order = self._order
        await asyncio.gather(
            *(self._again(self._idle, 5.0) for _ in range(order.connections)),
            *(self._again(self._slow, 1.0) for _ in range(order.slow)),
            *(self._again(self._half_sent, 5.0) for _ in range(HALF_SENT)),
            *(self._again(self._enrol, 0.5) for _ in range(ENROLLING)),
            *(self._again(self._nonsense, 0.0) for _ in range(AT_ONCE)),
        )

    async def _again(self, attack: Callable[[str], Awaitable[None]], pause: float) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await attack(self._sources[next(self._numbers) % ADDRESSES])
            await asyncio.sleep(pause + self._draw.random() / 10)

    async def _idle(self, source: str) -> None:
        async with self._shaking, asyncio.timeout(10):
            connection = Http2(*await tls_to(self._where, source))
        self.done["idle connections"] += 1
        try:
            await connection.reading
        finally:
            connection.close()

    async def _slow(self, source: str) -> None:
        _, writer = await asyncio.open_connection(*self._where, local_addr=(source, 0))
        try:
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40):
                writer.write(bytes([byte]))
                self.done["slow bytes"] += 1
                await asyncio.sleep(1)
                await writer.drain()
        finally:
            writer.transport.abort()

    async def _half_sent(self, source: str) -> None:
        async with asyncio.timeout(10):
            connection = await strangers.half_sent(self._where, source, 16, SIZE, 2 * SIZE)
        self.done["half-sent bytes"] += connection.sent
        try:
            await connection.reading
        finally:
            connection.close()

    async def _enrol(self, source: str) -> None:
        source = self._sources[self._draw.randrange(ENROLLING)]
        request = bytes.fromhex(self._order.request)
        async with asyncio.timeout(30):
            self.done["enrolled"] += await strangers.enrolments(self._where, source, self._order.token, request, 50)

    async def _nonsense(self, source: str) -> None:
        """Oversized, cut off or random messages, with a token or without, over one connection until it is cut."""
        async with asyncio.timeout(10):
            connection = Http2(*await tls_to(self._where, source))
        try:
            while not connection.closed:
                known = self._draw.random() < 0.5
                stream = connection.call(ENROL, [("token", self._order.token)] if known else [])
                size = self._draw.choice((20, 300, 17_000))
                announced = size + 5 if self._draw.random() < 0.3 else None
                async with asyncio.timeout(2):
                    await connection.send(stream, strangers.message(self._draw.randbytes(size), announced), end=True)
                self.done["nonsense"] += 1
                await asyncio.sleep(AT_ONCE / self._order.per_second)
        except TimeoutError:
            pass
        finally:
            connection.close()


async def main(order: Order) -> None:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it tells of every write to a connection that was cut
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda *_: None)
    loop.add_reader(sys.stdin, over.set)
    print(READY, flush=True)
    attack = Attack(order)
    attacking = asyncio.create_task(attack.run())
    await over.wait()
    attacking.cancel()
    print(json.dumps(dict(attack.done)), flush=True)
    os._exit(0)  # a thousand connections are closed by the system


if __name__ == "__main__":
    asyncio.run(main(Order(**json.loads(sys.argv[1]))))
