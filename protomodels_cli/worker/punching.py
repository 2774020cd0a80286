"""One end of a boundary that is relayed, trying to do without: asks where it is seen, tells the neighbour over the
relayed link, and connects to it while it connects to us.

When, and to where, is in punch_rules.py. It must not know messages, stages or the coordinator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc

from protomodels_cli import timeouts
from protomodels_cli.observe.logs import WIRE
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.join_link import Address
from protomodels_cli.wire.path import NotPunched, told
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.punch import family_of, open_together, port_to
from protomodels_cli.wire.relay import pipe_to
from protomodels_cli.wire.seen import seen_by, shared_port
from protomodels_cli.wire.splice import Stream
from protomodels_cli.wire.tls import Identity
from protomodels_cli.worker.links import Link, channel_to
from protomodels_cli.worker.punch_rules import (
    FIRST,
    Turns,
    checked_why,
    family_hosts,
    outside,
    target,
)

LOOK_EVERY = 0.5  # seconds
MOST_ACCEPTS = 2  # at a time: a connection that is used, and one that takes its place


class Punching:
    """`observers`: who may say where this machine is seen. `here`: the port that neighbours dial. `serve` serves the
    link over a channel, until that ends. `fails` is told why a try came to nothing."""

    def __init__(
        self,
        link: Link,
        route: Callable[[], pb.Route],
        observers: Callable[[], list[Address]],
        here: Callable[[], Address],
        identity: Callable[[], Identity],
        serve: Callable[[grpc.aio.Channel], Awaitable[None]],
        fails: Callable[[str], None],
        cap: Cap | None = None,
    ):
        self._link, self._route, self._observers, self._here = link, route, observers, here
        self._identity, self._serve, self._fails, self._cap = identity, serve, fails, cap
        self.turns = Turns()
        self._number = 0
        self._answer: asyncio.Future[pb.Punch] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        link.hears_punch = self._hear

    async def run(self) -> None:
        """While the link is kept open; what was found out about routers before is forgotten."""
        self.turns, since = Turns(), None
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY)
                now = time.monotonic()
                relayed = self._link.mended.is_set() and self._link.relayed
                since = (since or now) if relayed else None
                if self._dials and since is not None and now - since >= FIRST and self.turns.is_due(now):
                    await self._offer()
        finally:
            for task in (tasks := [*self._tasks]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _dials(self) -> bool:
        """It is this end that offers, and that is TLS's client."""
        return self._route().way == pb.Route.DIAL

    @property
    def _known(self) -> list[str]:
        """Where the coordinator has seen or reached the neighbour; what it says of its own network is not that."""
        return family_hosts(candidate.host for candidate in self._route().candidates if candidate.kind == "public")

    async def _offer(self) -> None:
        self._number += 1
        known = self._known
        if not known:
            self._failed(told("not_listening", here=False))
            return
        self._answer = asyncio.get_running_loop().create_future()
        try:
            stream = await self._meet(self._number, family_of(known[0]), self._answer)
            if stream is not None:
                await self._carry(stream)
        except OSError as error:
            WIRE.debug("no port for a punched link to stage %d: %r", self._link.neighbour_stage, error)
            self._failed(told("not_seen", here=True))
        finally:
            self._answer = None

    def _hear(self, punch: pb.Punch) -> None:
        if self._dials:
            if self._answer is not None and punch.number == self._number and not self._answer.done():
                self._answer.set_result(punch)
        elif not self.turns.answers(time.monotonic()):
            return
        elif punch.why:
            self._failed(told(checked_why(punch.why), here=False))
        elif len(self._tasks) < MOST_ACCEPTS:
            task = asyncio.create_task(self._accept(punch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _accept(self, offer: pb.Punch) -> None:
        to = target(offer.host, offer.port, self._known)
        if isinstance(to, str):
            self._refuse(offer.number, to)
            self._failed(told(to, here=False))
            return
        answered: asyncio.Future[pb.Punch] = asyncio.get_running_loop().create_future()
        answered.set_result(offer)
        try:
            if (stream := await self._meet(offer.number, family_of(to[0]), answered)) is not None:
                self.turns.opened()
                await pipe_to(self._here(), stream, self._cap)
        except OSError as error:
            WIRE.debug("no port for a punched link to stage %d: %r", self._link.neighbour_stage, error)
            self._failed(told("not_seen", here=True))

    async def _meet(self, number: int, family: int, other: asyncio.Future[pb.Punch]) -> Stream | None:
        """Say where this end is seen, hear where the other is, and connect; None: it failed."""
        with shared_port(family) as kept:
            port = kept.getsockname()[1]
            async with seen_by(self._observers(), family, port) as seen:
                mine = outside(seen)
                if isinstance(mine, str):
                    self._refuse(number, mine)
                    self._failed(told(mine, here=True))
                    return None
                self._link.say_punch(pb.Punch(number=number, host=mine[0], port=mine[1]))
                try:
                    async with asyncio.timeout(timeouts.PUNCH_ANSWER):
                        answer = await other
                except TimeoutError:
                    self._failed("no_answer")
                    return None
                if answer.why:
                    why = checked_why(answer.why)  # of the address that this end gave, or of the neighbour
                    self._failed(told(why, here=why in ("other_address", "not_listening")))
                    return None
                to = target(answer.host, answer.port, self._known)
                if isinstance(to, str):
                    self._failed(told(to, here=False))
                    return None
                try:
                    return await open_together(port, to, timeouts.PUNCH_OPEN)
                except TimeoutError:
                    self._failed("not_opened")
                    return None

    async def _carry(self, stream: Stream) -> None:
        async with port_to(stream, self._cap) as port:
            channel = channel_to(self._link, "127.0.0.1", port, self._identity())
            try:
                async with asyncio.timeout(timeouts.PUNCH_OPEN):
                    await channel.channel_ready()
            except TimeoutError:  # whoever answered is not the neighbour, or has gone
                await channel.close()
                self._failed("not_opened")
                return
            except BaseException:
                await channel.close()
                raise
            self.turns.opened()
            await self._serve(channel)

    def _refuse(self, number: int, why: NotPunched) -> None:
        self._link.say_punch(pb.Punch(number=number, why=why))

    def _failed(self, why: str) -> None:
        self.turns.failed(why, time.monotonic())
        self._fails(why)
