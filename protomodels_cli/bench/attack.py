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
from protomodels_cli.bench.strangers import Batches, Http2, loopback_addresses, tls_to

READY = "ready"  # said when all of it has begun
BEGINS = {"idle connections", "slow bytes", "nonsense"}  # what an attack has done that has begun
BEGINS_SECONDS = 60.0
ADDRESSES, CROWD = (
    64,
    2048,
)  # … from which messages that are none come: after a few, each costs its sender the connection
ENROLLING = 16  # addresses from which one token is used
HALF_SENT, SIZE = 40, 2 << 20  # connections, of 16 calls each; bytes that each announces, and sends all but one of
AT_ONCE = 16  # handshakes
BACK_AFTER = 20.0  # seconds that who was cut off stays away: a handshake takes more of a processor than 20 messages
TALKING, CALLS = 96, 16  # connections for messages that are none, and how many go to a write: as many as may be open
BY_STRANGERS = 64  # of so many writes one is a stranger's, who is cut off for it: that costs a handshake each time


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
        self._crowd, self._crowded = loopback_addresses(CROWD, ADDRESSES + 2), count()
        self._batches, self._writes, self._due = Batches(order.token, self._draw), count(), 0.0
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        order = self._order
        await asyncio.gather(
            *(self._again(self._idle, BACK_AFTER) for _ in range(order.connections)),
            *(self._again(self._slow, 1.0) for _ in range(order.slow)),
            *(self._again(self._half_sent, BACK_AFTER) for _ in range(HALF_SENT)),
            *(self._again(self._enrol, 2.0) for _ in range(ENROLLING)),
            *(self._again(self._nonsense, 0.0) for _ in range(TALKING)),
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
            connection = await strangers.half_sent(self._where, source, 16, SIZE - 1, SIZE)
        self.done["half-sent bytes"] += connection.sent
        try:
            await connection.reading
        finally:
            connection.close()

    async def _enrol(self, source: str) -> None:
        source = self._sources[self._draw.randrange(ENROLLING)]
        request = bytes.fromhex(self._order.request)
        async with asyncio.timeout(30):
            enrolled = await strangers.enrolments(self._where, source, self._order.token, request, 50)
        self.done["enrolled"] += enrolled

    async def _nonsense(self, _: str) -> None:
        """Oversized, cut off or random messages over one connection until it is cut; from time to time a stranger's."""
        source = self._crowd[next(self._crowded) % CROWD]
        async with asyncio.timeout(10):
            connection = Http2(*await tls_to(self._where, source))
        try:
            while not connection.closed:
                number = next(self._writes)
                is_known = number % BY_STRANGERS != 0
                kinds = self._batches.known if is_known else self._batches.small
                self.done["nonsense"] += CALLS
                async with asyncio.timeout(5):
                    answered = await connection.send_batch(self._batches, kinds, number * CALLS, CALLS)
                self.done["answered"] += answered  # not across the wait, in which others add to it
                if not is_known:
                    break
                await self._pace()
        except TimeoutError:
            pass
        finally:
            connection.close()

    async def _pace(self) -> None:
        """So that all of them together send as many a second as they should."""
        self._due = max(self._due, asyncio.get_running_loop().time() - 1.0) + CALLS / self._order.per_second
        await asyncio.sleep(self._due - asyncio.get_running_loop().time())


async def main(order: Order) -> None:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it tells of every write to a connection that was cut
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda *_: None)
    loop.add_reader(sys.stdin, over.set)
    attack = Attack(order)
    attacking = asyncio.create_task(attack.run())
    async with asyncio.timeout(BEGINS_SECONDS):
        while not attack.done.keys() >= BEGINS:
            await asyncio.sleep(0.01)
    print(READY, flush=True)
    await over.wait()
    attacking.cancel()
    print(json.dumps(dict(attack.done)), flush=True)
    os._exit(0)  # a thousand connections are closed by the system


if __name__ == "__main__":
    asyncio.run(main(Order(**json.loads(sys.argv[1]))))
