"""Links through a relay for peers that nobody can dial: both dial out with one ticket, the relay splices their bytes.

All three parts: the relay's, the serving peer's, the dialling peer's. TLS runs end to end inside, so none of them may
know keys or look at the bytes, and a relay is not trusted.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from protomodels_cli import timeouts
from protomodels_cli.errors import EXIT_REFUSED, UserError
from protomodels_cli.retry import Backoff
from protomodels_cli.wire.cap import Cap, carry_under
from protomodels_cli.wire.join_link import Address, LinkError, address, parse_address
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.splice import FORTH, Stream, send_last, splice, tune

Role = Literal["accept", "dial"]
Sent = Callable[[int], float]  # is told how many bytes were sent, and returns for how many seconds no more are taken
TICKET = re.compile(r"[A-Za-z0-9_-]{1,160}")
RELAY = re.compile(rb"PMTRAIN 1 RELAY ([A-Za-z0-9_-]{1,160}) (accept|dial)\n")
OPPOSITE = {"accept": "dial", "dial": "accept"}
OK, NOBODY, UNKNOWN = b"OK\n", b"NOBODY\n", b"UNKNOWN\n"
ALONE = "other_peer_missing"  # kind of a RelayError: an idle link, no fault
MAX_LIVE = 16  # connections through one ticket at one time; a link needs one, a reconnect a second


class RelayError(UserError):
    """The relay answers, but does not connect us."""

    exit_code = EXIT_REFUSED

    def __init__(self, answer: bytes, relay: Address):
        kind, what, fix = {
            NOBODY: (ALONE, "the other peer did not connect in time", "wait: pmtrain retries by itself"),
            UNKNOWN: ("unknown_ticket", "the ticket is not valid, or was withdrawn", "join the run again"),
        }.get(
            answer,
            (
                "not_a_relay",
                "closed the connection, or is not a relay of pmtrain",
                "check that the address is the coordinator's",
            ),
        )
        super().__init__(f"relay {address(*relay)}: {what}", fix, kind=kind)


@dataclass(eq=False)
class _Side:
    """One side of a relayed link, waiting for the other."""

    stream: Stream
    sent: Sent  # is told of what this side sends
    met: asyncio.Future[bool]  # False: replaced by a newer connection, or the ticket was withdrawn
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Meetings:
    """The relay's part: who may meet, who waits, who is connected."""

    def __init__(self, wait_seconds: float | None = None):
        self._wait_seconds = timeouts.RELAY_WAIT if wait_seconds is None else wait_seconds
        self._tickets: set[str] = set()
        self._waiting: dict[tuple[str, str], _Side] = {}
        self._pairs: dict[str, list[tuple[Stream, Stream]]] = {}
        self._moved: dict[str, Counter[str]] = {}  # ticket → role → bytes that it sent

    def allow(self, ticket: str) -> None:
        """Let two peers meet under this ticket, as often as they need to. The ticket is a secret of the three of us."""
        self._tickets.add(checked(ticket))

    def allows(self, ticket: str) -> bool:
        return ticket in self._tickets

    def forbid(self, ticket: str) -> dict[Role, int]:
        """Withdraw a ticket: who waits under it is sent away, who is connected is cut off. Returns what was moved."""
        self._tickets.discard(ticket)
        for role in OPPOSITE:
            self._send_away(ticket, role)
        for pair in self._pairs.get(ticket, []):
            for _, writer in pair:
                writer.transport.abort()
        moved = self.moved(ticket)
        self._moved.pop(ticket, None)
        return moved

    async def attend(self, stream: Stream, ticket: str, role: str) -> bool:
        """Serve one connection to its end, which includes closing it. False if it had no valid ticket."""
        if ticket not in self._tickets:
            await send_last(stream[1], UNKNOWN)
            return False
        if not await self.meet(stream, ticket, role) and ticket not in self._tickets:
            await send_last(stream[1], UNKNOWN)  # it was withdrawn
        return True

    async def meet(self, stream: Stream, ticket: str, role: str, sent: Sent = lambda size: 0.0) -> bool:
        """The same for whoever has shown that it may. False: it was sent away."""
        other = self._waiting.get((ticket, OPPOSITE[role]))
        if other is not None and (other.stream[0].at_eof() or other.stream[1].is_closing()):  # it left while it waited
            self._send_away(ticket, OPPOSITE[role])
            other = None
        if other is None:
            return await self._wait(stream, ticket, role, sent)
        del self._waiting[ticket, OPPOSITE[role]]
        other.met.set_result(True)
        await self._connect(ticket, role, stream, sent, other)
        return True

    def moved(self, ticket: str) -> dict[Role, int]:
        """Bytes that each side has sent under this ticket, as the sockets saw them."""
        count = self._moved.get(ticket, Counter())
        return {"dial": count["dial"], "accept": count["accept"]}

    async def _wait(self, stream: Stream, ticket: str, role: str, sent: Sent) -> bool:
        self._send_away(ticket, role)  # a newer connection of the same peer: the older one is dead
        side = self._waiting[ticket, role] = _Side(stream, sent, asyncio.get_running_loop().create_future())
        try:
            await asyncio.wait({side.met}, timeout=self._wait_seconds)
        finally:
            if self._waiting.get((ticket, role)) is side:
                del self._waiting[ticket, role]
        if not side.met.done():
            await send_last(stream[1], NOBODY)
        elif side.met.result():
            await side.ended.wait()
        return not side.met.done() or side.met.result()

    async def _connect(self, ticket: str, role: str, stream: Stream, sent: Sent, other: _Side) -> None:
        pair = (stream, other.stream)
        count = self._moved.setdefault(ticket, Counter())

        def watch(way: int, size: int) -> float:
            count[role if way == FORTH else OPPOSITE[role]] += size
            return (sent if way == FORTH else other.sent)(size)

        pairs = self._pairs.setdefault(ticket, [])
        pairs.append(pair)
        try:
            for _, writer in pair:
                writer.write(OK)
            await splice(*pair, watch)
        finally:
            other.ended.set()
            pairs.remove(pair)
            if not pairs:
                self._pairs.pop(ticket, None)
                if ticket not in self._tickets:  # nobody will ask for it
                    self._moved.pop(ticket, None)

    def _send_away(self, ticket: str, role: str) -> None:
        if side := self._waiting.pop((ticket, role), None):
            side.met.set_result(False)


def checked(ticket: str) -> str:
    if not TICKET.fullmatch(ticket):
        raise ValueError("a ticket must have 1 to 160 letters, digits, - and _")
    return ticket


async def dial_relay(host: str, port: int, ticket: str, role: Role, timeout: float = timeouts.RELAY_ANSWER) -> Stream:
    """A connection to whoever comes with the same ticket and the other role. Waits for them.

    Raises RelayError, or OSError (TimeoutError among them) if the relay cannot be reached.
    """
    line = f"PMTRAIN 1 RELAY {checked(ticket)} {role}\n".encode()
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            tune(writer)
            writer.write(line)
            answer = b""
            # Byte by byte: what follows the line belongs to the other peer's TLS.
            while not answer.endswith(b"\n") and len(answer) < 16 and (byte := await reader.read(1)):
                answer += byte
            if answer != OK:
                raise RelayError(answer, (host, port))
        except BaseException:
            writer.transport.abort()
            raise
    return reader, writer


async def relay_trips(relays: Sequence[str]) -> list[pb.RelayTrip]:
    """Seconds to each relay and back, as long as a connection takes; those that cannot be reached are left out."""

    async def trip(relay: str) -> pb.RelayTrip | None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeouts.RELAY_TRIP):
                _, writer = await asyncio.open_connection(*parse_address(relay))
        except (OSError, LinkError):
            return None
        seconds = time.monotonic() - began
        writer.transport.abort()
        return pb.RelayTrip(relay=relay, seconds=seconds)

    return [found for found in await asyncio.gather(*map(trip, relays)) if found is not None]


class _Relayed:
    """What both ends of a relayed link have: `error` is what keeps the link from working, `problem` the same as a
    sentence; None where the link works. `on_problem` is called at every change, once."""

    def __init__(self, relay: Address, ticket: str, on_problem: Callable[[str | None], None]):
        self.relay, self.ticket = relay, checked(ticket)
        self.error: OSError | RelayError | None = None
        self.problem: str | None = None
        self._on_problem = on_problem
        self._live: set[asyncio.Task[None]] = set()

    def _note(self, error: OSError | RelayError | None) -> None:
        self.error, problem = error, None if error is None else _in_words(error, self.relay)
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)


class RelayedAcceptor(_Relayed):
    """For the peer that serves: waits at the relay and pipes each connection to `target`, its own port."""

    def __init__(
        self,
        relay: Address,
        ticket: str,
        target: Address,
        on_problem: Callable[[str | None], None] = lambda words: None,
        cap: Cap | None = None,
    ):
        super().__init__(relay, ticket, on_problem)
        self.target, self._cap = target, cap
        self._waiter: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._waiter = asyncio.create_task(self._keep_waiting())

    async def close(self) -> None:
        await _cancel([*self._live, *([self._waiter] if self._waiter else [])])

    async def _keep_waiting(self) -> None:
        backoff = Backoff(timeouts.RELAY_FIRST_PAUSE, timeouts.RELAY_LONGEST_PAUSE)
        while True:
            try:
                stream = await dial_relay(*self.relay, self.ticket, "accept")
            except (OSError, RelayError) as error:
                # The other peer is missing: that is how an idle link looks, so no fault, and the pause stays short.
                if idle := isinstance(error, RelayError) and error.kind == ALONE:
                    backoff.reset()
                self._note(None if idle else error)
                wait = backoff.after_failure(time.monotonic())
                assert wait is not None, "its generation ends it"
                await asyncio.sleep(wait)
                continue
            self._note(None)
            backoff.reset()
            # The next wait starts at once, beside this connection: a dialler that lost its own comes back before
            # anyone here knows that the old one is dead.
            _spawn(self._live, pipe_to(self.target, stream, self._cap))
            if len(self._live) >= MAX_LIVE:
                await asyncio.wait(self._live, return_when=asyncio.FIRST_COMPLETED)


class RelayedDialler(_Relayed):
    """For the peer that dials: a port on loopback whose every connection goes through the relay."""

    def __init__(
        self,
        relay: Address,
        ticket: str,
        on_problem: Callable[[str | None], None] = lambda words: None,
        cap: Cap | None = None,
    ):
        super().__init__(relay, ticket, on_problem)
        self._cap = cap
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen; returns the local port."""
        self._server = await asyncio.start_server(self._come_in, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await _cancel(self._live)

    def _come_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._live) >= MAX_LIVE or self._server is None or not self._server.is_serving():
            writer.transport.abort()
        else:
            _spawn(self._live, self._pass_on((reader, writer)))

    async def _pass_on(self, local: Stream) -> None:
        try:
            tune(local[1])
            remote = await dial_relay(*self.relay, self.ticket, "dial")
            self._note(None)
            await carry_under(self._cap, local, remote)
        except (OSError, RelayError) as error:
            self._note(error)  # gRPC sees a failed connection and retries by itself
        finally:
            local[1].transport.abort()


async def pipe_to(target: Address, stream: Stream, cap: Cap | None = None) -> None:
    """Lead this stream to a port of this machine, until it ends."""
    try:
        local = await asyncio.open_connection(*target)
        tune(local[1])
        await carry_under(cap, local, stream)
    except OSError:
        pass  # our own server is not up: the dialler sees the connection end and retries
    finally:
        stream[1].transport.abort()


def _in_words(error: OSError | RelayError, relay: Address) -> str:
    if isinstance(error, RelayError):
        return str(error).splitlines()[0]
    reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return f"relay {address(*relay)}: {reason}"


def _spawn(live: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    live.add(task)  # the loop itself keeps no hold on its tasks
    task.add_done_callback(live.discard)


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
