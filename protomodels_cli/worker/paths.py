"""The way to one neighbour: its addresses and the relays are tried side by side, the first that leads to it is used,
and while that is a relay, a direct one is looked for.

Knows addresses and streams. It must not know messages, stages or the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from protomodels_cli import timeouts
from protomodels_cli.observe.logs import WIRE
from protomodels_cli.retry import Backoff
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.channels import is_loopback, own_address
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.wire.join_link import Address, address
from protomodels_cli.wire.path import PUNCHED, is_relayed
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.relay import RelayedAcceptor, RelayedDialler
from protomodels_cli.wire.tls import Identity
from protomodels_cli.worker.links import Link, channel_to, serve_over
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.punching import Punching

STAGGER, RELAY_STAGGER = 0.15, 1.0  # seconds between one address and the next, and relays: the nearer one has a start
REDIAL = 0.2, 2.0  # seconds between tries: at first, at most
SHORT_LIFE, PARDON, LONGEST_PARDON = 30.0, 60.0, 3600.0  # see Trust


@dataclass(frozen=True)
class Network:
    """What all generations of one peer share. It must not know any of them."""

    identity: Callable[[], Identity]  # as it is now
    listener: Listener
    door: Callable[[], Address]  # the coordinator's, where relayed links meet if nowhere else
    connection: Connection | None  # where a slow one is emulated
    cap: Cap | None = None  # on all that this peer sends and receives


class Trust:
    """Whether direct paths are worth a try. One that opens and soon breaks, time and again, is worse than none: large
    packets may not pass it. After the second time it is left alone for a minute, then for longer and longer. Pure."""

    def __init__(self) -> None:
        self._breaks, self._until = 0, 0.0

    def broke(self, lived: float, now: float) -> None:
        """A direct stream, after so many seconds."""
        self._breaks = self._breaks + 1 if lived < SHORT_LIFE else 0
        if self._breaks >= 2:
            self._until = now + min(PARDON * 2.0 ** min(self._breaks - 2, 16), LONGEST_PARDON)

    def holds(self, now: float) -> bool:
        return now >= self._until


@dataclass(frozen=True)
class Try:
    delay: float
    path: str
    place: Address
    ticket: str = ""  # of a relay


def tries(route: pb.Route, door: Address, trusted: bool) -> Iterator[Try]:
    """What is tried, and when. Pure."""
    if trusted:
        yield from direct_tries(route)
    first = 0.0 if route.unlikely or not trusted else timeouts.PATH_DIRECT_ALONE
    relays = [(f"relay {address(r.host, r.port)}", (r.host, r.port), r.ticket) for r in route.relays]
    for i, (path, place, ticket) in enumerate([*relays, ("door", door, route.ticket)]):
        yield Try(first + i * RELAY_STAGGER, path, place, ticket)


def direct_tries(route: pb.Route) -> Iterator[Try]:
    for i, c in enumerate(route.candidates):
        yield Try(i * STAGGER, c.kind, (c.host, c.port))


class Way:
    """To one neighbour, for one generation. `hears` is called with what keeps a relay from working; None: it works.
    `not_punched`: with why it is not punched, where that was tried."""

    def __init__(
        self,
        link: Link,
        route: pb.Route,
        network: Network,
        hears: Callable[[str, str | None], None],
        not_punched: Callable[[str], None] = lambda why: None,
    ):
        self.link, self.route, self._network, self._hears = link, route, network, hears
        self._diallers: dict[str, tuple[RelayedDialler, int]] = {}  # by path, with their ports
        self._acceptors: dict[str, RelayedAcceptor] = {}
        self._trust = Trust()
        self._streams: set[asyncio.Task[None]] = set()
        self.punching = Punching(
            link,
            lambda: self.route,
            lambda: [t.place for t in tries(self.route, network.door(), False)],
            self._own_port,
            network.identity,
            lambda channel: self._move_to(PUNCHED, channel),
            not_punched,
            network.cap,
        )

    @property
    def problem(self) -> str | None:
        """What keeps the relays from working, where none does."""
        problems = [relay.problem for relay in self._relays]
        return problems[-1] if problems and all(problems) else None

    @property
    def _relays(self) -> list[RelayedAcceptor | RelayedDialler]:
        return [*self._acceptors.values(), *(dialler for dialler, _ in self._diallers.values())]

    def problem_of(self, path: str) -> str | None:
        relay = self._acceptors.get(path) or self._diallers.get(path, (None,))[0]
        return None if relay is None else relay.problem

    async def update(self, route: pb.Route) -> bool:
        """The neighbour as it is now. Returns whether the way begins anew: it has moved, or this machine has."""
        moved = (route.way, list(route.candidates)) != (self.route.way, list(self.route.candidates))
        self.route = route
        for path, acceptor in self._acceptors.items():
            acceptor.ticket = self._ticket(path) or acceptor.ticket
        for path, (dialler, _) in self._diallers.items():
            dialler.ticket = self._ticket(path) or dialler.ticket
        if moved:
            await self.link.leave_stream()
        return moved

    def _ticket(self, path: str) -> str:
        return next((t.ticket for t in tries(self.route, self._network.door(), False) if t.path == path), "")

    async def run(self) -> None:
        """Keep the link open until it is closed for good; raises what the neighbour did wrong."""
        self._spawn(self._look())
        self._spawn(self.punching.run())
        try:
            await (self._dial() if self.route.way == pb.Route.DIAL else self._listen())
        finally:
            for task in (streams := [*self._streams]):
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        if self.link.error is not None:
            raise self.link.error

    async def close(self) -> None:
        for relay in self._relays:
            await relay.close()

    async def _dial(self) -> None:
        """Open one stream after another, until the link is closed."""
        link, backoff = self.link, Backoff(*REDIAL)
        while not link.closed.is_set():
            if link.mended.is_set():  # the neighbour has found a better path than ours
                await first_of(link.broken.wait(), link.closed.wait())
                continue
            before = link.streams
            trusted = self._trust.holds(time.monotonic())
            found = await self._race([*tries(self.route, self._network.door(), trusted)], timeouts.PATH_FIND)
            if found is not None:
                await self._serve(*found)
            if link.streams > before:
                backoff.reset()
            wait = backoff.after_failure(time.monotonic())
            assert wait is not None, "the generation ends it"
            await asyncio.sleep(wait)

    async def _listen(self) -> None:
        """The neighbour dials. Once it has not come, or not come back, for a while, wait for it at the relays too."""
        link = self.link
        if self.route.unlikely:
            self._wait_at_relays()
        while not link.closed.is_set():
            await first_of(link.mended.wait(), link.closed.wait(), asyncio.sleep(timeouts.PATH_DIRECT_ALONE))
            if not link.mended.is_set():
                self._wait_at_relays()
                await first_of(link.mended.wait(), link.closed.wait())
            await first_of(link.broken.wait(), link.closed.wait())

    def _wait_at_relays(self) -> None:
        for t in tries(self.route, self._network.door(), False):
            if t.path not in self._acceptors:
                acceptor = RelayedAcceptor(t.place, t.ticket, self._own_port(), self._hearer(t.path), self._network.cap)
                acceptor.start()
                self._acceptors[t.path] = acceptor

    async def _look(self) -> None:
        """For a direct path, as long as there is none; whichever end finds one. They look in turn."""
        half = timeouts.PATH_LOOK_EVERY / 2
        await asyncio.sleep(timeouts.PATH_LOOK_FIRST + (0 if self.route.way == pb.Route.DIAL else half))
        while True:
            if self._wants_better() and (found := await self._race([*direct_tries(self.route)], timeouts.PATH_LOOK)):
                # What was looked after until now ends by itself; this goes on beside the next look.
                self._spawn(self._move_to(*found))
            await asyncio.sleep(timeouts.PATH_LOOK_EVERY)

    async def _move_to(self, path: str, channel: grpc.aio.Channel) -> None:
        """Serve the link over this one as soon as nothing is on its way, if it is relayed still."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeouts.PATH_MOVE):
                while not self.link.quiet:
                    await asyncio.sleep(0.01)
        if self.link.mended.is_set() and self.link.relayed:
            await self._serve(path, channel)
        else:
            await channel.close()

    def _wants_better(self) -> bool:
        return self.link.mended.is_set() and self.link.relayed and self._trust.holds(time.monotonic())

    def _own_port(self) -> Address:
        return "127.0.0.1", self._network.listener.inner_port

    async def _serve(self, path: str, channel: grpc.aio.Channel) -> None:
        """A stream over this channel, until it breaks, or has not opened after a while, or another took its place."""
        link, before, began = self.link, self.link.streams, time.monotonic()
        stream = self._spawn(serve_over(channel, link, path))
        try:
            await first_of(asyncio.wait({stream}), asyncio.sleep(timeouts.PATH_OPEN))
            if link.streams > before:
                await asyncio.wait({stream})
        finally:
            stream.cancel()
            [ended] = await asyncio.gather(stream, return_exceptions=True)
            await channel.close()
        WIRE.debug("the stream to stage %d over %s ended: %s", link.neighbour_stage, path, ended)
        replaced = link.mended.is_set()
        if not is_relayed(path) and not replaced and not link.closed.is_set():
            now = time.monotonic()
            (self.punching.turns if path == PUNCHED else self._trust).broke(now - began, now)
        expected = grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError, OSError, asyncio.CancelledError
        if isinstance(ended, BaseException) and not isinstance(ended, expected) and ended is not link.error:
            raise ended

    async def _race(self, plan: Sequence[Try], seconds: float) -> tuple[str, grpc.aio.Channel] | None:
        """The first of these over which the neighbour answers, as its certificate proves; None: none in time."""
        running = {asyncio.create_task(self._attempt(one)) for one in plan}
        won: tuple[str, grpc.aio.Channel] | None = None
        try:
            async with asyncio.timeout(seconds):
                while running and won is None:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        if task.exception() is not None:
                            WIRE.debug("a way to stage %d: %r", self.link.neighbour_stage, task.exception())
                        elif won is None:
                            won = task.result()
                        else:
                            await task.result()[1].close()
        except TimeoutError:
            pass
        finally:
            for task in running:
                task.cancel()
            for late in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(late, tuple):
                    await late[1].close()
        return won

    async def _attempt(self, one: Try) -> tuple[str, grpc.aio.Channel]:
        await asyncio.sleep(one.delay)
        place, cap = one.place, self._network.cap
        if is_relayed(one.path):
            place = await self._local_end(one)
        elif cap is not None:
            place = cap.way_to(place)
        channel = channel_to(self.link, *place, self._network.identity())
        try:
            await channel.channel_ready()
        except BaseException:
            await channel.close()
            raise
        return one.path, channel

    async def _local_end(self, one: Try) -> Address:
        """The port here that leads to the neighbour through the relay."""
        if one.path not in self._diallers:
            dialler = RelayedDialler(one.place, one.ticket, self._hearer(one.path), self._network.cap)
            self._diallers[one.path] = dialler, await dialler.open()
        return "127.0.0.1", self._diallers[one.path][1]

    def _hearer(self, path: str) -> Callable[[str | None], None]:
        return lambda problem: self._hears(path, problem)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return task


async def follow_address(moved: Callable[[], Awaitable[None]]) -> None:
    """Call this whenever the address with which this machine reaches others has changed: connections from the one
    before are dead, which the system would notice only when nothing is confirmed any more."""
    known = _address()
    while True:
        await asyncio.sleep(timeouts.ADDRESS_EVERY)
        now = _address()
        if is_loopback(now) or now == known:  # in between there may be none
            continue
        was, known = known, now
        if not is_loopback(was):
            await moved()


def _address() -> str:
    """Of a machine with IPv6 alone, that: else it changes from day to day, and connections live on."""
    return own if not is_loopback(own := own_address()) else own_address(socket.AF_INET6)


async def first_of(*events: Awaitable[Any]) -> None:
    """Returns when one of them has happened."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
