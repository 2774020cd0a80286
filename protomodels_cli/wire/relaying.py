"""A relay that stands by itself (`pmtrain relay`): splices the bytes of peers that show tickets of a coordinator which
has its secret, limits and counts them by run and peer.

It sees who meets whom, when, and how many bytes: those are TLS between the two peers, under a CA that it does not have.
It must not know spec, stages or messages.
"""

from __future__ import annotations

import asyncio
import json
import time
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protomodels_cli import timeouts
from protomodels_cli.files import write_whole
from protomodels_cli.wire.addresses import network_of
from protomodels_cli.wire.rates import Bucket, Buckets, Rate
from protomodels_cli.wire.relay import RELAY, UNKNOWN, Meetings
from protomodels_cli.wire.seen import ASK_SEEN, seen_at
from protomodels_cli.wire.splice import send_last, tune
from protomodels_cli.wire.tickets import Ticket, read_ticket

BOOKS, BOOKS_EVERY = "relayed.json", 60.0  # seconds between two times that the file is written
BURST_SECONDS = 0.5  # of its rate, that a peer may send at once
ASK_SECONDS = 10.0  # of the rate of questions, that may come at once


@dataclass(frozen=True)
class RelayLimits:
    """What strangers, a run and a peer may use. Bits a second; 0: as many as there are."""

    connections: int = 4096
    connections_per_address: int = 256
    connections_per_run: int = 1024
    connections_per_peer: int = 32  # a link needs one, and another while it reconnects; all wait at several relays
    bits_per_run: float = 0.0
    bits_per_peer: float = 0.0
    first_seconds: float = 5.0  # for the first line
    line_bytes: int = 256
    wait_seconds: float = field(default_factory=lambda: timeouts.RELAY_WAIT)
    questions_a_second: float = 100.0  # where they are seen, of all callers together
    questions_per_network: float = 4.0  # a second


@dataclass
class Allowance:
    """Bytes that come back at a rate. Who takes more than there are rests. Pure."""

    bits_per_second: float
    used_up_at: float = 0.0  # until when the rate has been spent

    def take(self, size: int, now: float) -> float:
        """Seconds to rest after these bytes."""
        if not self.bits_per_second:
            return 0.0
        self.used_up_at = max(self.used_up_at, now - BURST_SECONDS) + 8 * size / self.bits_per_second
        return max(0.0, self.used_up_at - now)


@dataclass
class Books:
    """Bytes and connections by run and peer, since the relay began."""

    sent: dict[str, Counter[str]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> bytes:
        runs = {run: dict(sorted(peers.items())) for run, peers in sorted(self.sent.items())}
        return json.dumps({"bytes_sent": runs, "refused": dict(self.refused)}, indent=2).encode() + b"\n"


class _Refused(Exception):
    """Cut this connection; the argument is the kind of refusal that is counted."""


class Relay:
    def __init__(self, secret: str, limits: RelayLimits = RelayLimits(), now: Callable[[], float] = time.time):
        self.books, self._secret, self._limits, self._now = Books(), secret, limits, now
        self._meetings = Meetings(limits.wait_seconds)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._by: Counter[tuple[str, ...]] = Counter()  # connections by address, by run, by run and peer
        self._runs: dict[str, Allowance] = {}
        self._peers: dict[tuple[str, str], Allowance] = {}
        self._asking = Rate(limits.questions_a_second, limits.questions_a_second * ASK_SECONDS)
        self._questions = Bucket.full(self._asking, time.monotonic())
        by_network = Rate(limits.questions_per_network, limits.questions_per_network * ASK_SECONDS)
        self._questions_by = Buckets(by_network)

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        self._server = await asyncio.start_server(self._come_in, host, port, reuse_port=False)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def keep_books(self, folder: Path) -> None:
        while True:
            await asyncio.sleep(BOOKS_EVERY)
            self.write_books(folder)

    def write_books(self, folder: Path) -> None:
        write_whole(folder / BOOKS, self.books.as_json(), 0o600)

    def _come_in(self, reader: StreamReader, writer: StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        where = ("address", network_of(peer[0].partition("%")[0])) if peer else ("address", "")
        full = len(self._tasks) >= self._limits.connections
        if full or not peer or self._by[where] >= self._limits.connections_per_address:
            self.books.refused["too_many_connections"] += bool(peer)
            writer.transport.abort()
            return
        self._by[where] += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._went(done, where))

    def _went(self, task: asyncio.Task[None], where: tuple[str, ...]) -> None:
        self._tasks.discard(task)
        self._leave(where)

    def _leave(self, *places: tuple[str, ...]) -> None:
        for place in places:
            self._by[place] -= 1
            if not self._by[place]:  # strangers' addresses must not pile up here
                del self._by[place]

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            tune(writer)
            line = await self._line(reader)
            if line == ASK_SEEN:
                peer = writer.get_extra_info("peername")
                if not self._may_ask(network_of(peer[0].partition("%")[0]), time.monotonic()):
                    raise _Refused("too_many_questions")
                await send_last(writer, seen_at(peer))
                return
            asked = RELAY.fullmatch(line)
            if asked is None:
                raise _Refused("unknown_request")
            role = asked[2].decode()
            ticket = read_ticket(asked[1].decode(), self._secret, role, self._now())
            if ticket is None:
                await send_last(writer, UNKNOWN)
                raise _Refused("unknown_ticket")
            await self._meet(reader, writer, ticket, role)
        except _Refused as refusal:
            self.books.refused[str(refusal)] += 1
        except OSError:
            pass  # the caller closed the connection: nothing to report
        finally:
            writer.transport.abort()

    def _may_ask(self, network: str, now: float) -> bool:
        """What is refused takes nothing, and a network's own limit comes first: none can use up the others' share by
        itself."""
        if not self._questions_by.take(network, now):
            return False
        left = self._questions.take(self._asking, 1, now)
        self._questions = left or self._questions
        return left is not None

    async def _line(self, reader: StreamReader) -> bytes:
        """The first line, and not a byte more: the rest is for the other peer."""
        line = b""
        try:
            async with asyncio.timeout(self._limits.first_seconds):
                while not line.endswith(b"\n"):
                    if len(line) >= self._limits.line_bytes:
                        raise _Refused("line_too_long")
                    line += await reader.readexactly(1)
        except (TimeoutError, asyncio.IncompleteReadError):
            raise _Refused("no_request") from None
        return line

    async def _meet(self, reader: StreamReader, writer: StreamWriter, ticket: Ticket, role: str) -> None:
        run, peer = ("run", ticket.run), ("peer", ticket.run, ticket.peer)
        if self._by[run] >= self._limits.connections_per_run or self._by[peer] >= self._limits.connections_per_peer:
            raise _Refused("too_many_of_one_run")
        count = self.books.sent.setdefault(ticket.run, Counter())
        ours = self._runs.setdefault(ticket.run, Allowance(self._limits.bits_per_run))
        own = self._peers.setdefault((ticket.run, ticket.peer), Allowance(self._limits.bits_per_peer))

        def sent(size: int) -> float:
            count[ticket.peer] += size
            now = time.monotonic()
            return max(ours.take(size, now), own.take(size, now))

        self._by.update((run, peer))
        try:
            await self._meetings.meet((reader, writer), f"{ticket.run}-{ticket.meeting}", role, sent)
        finally:
            self._leave(run, peer)
