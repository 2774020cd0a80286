"""Looks at this machine's line to a coordinator: enrols as a joining peer does, holds nothing, and leaves.

The padding that is sent and asked for is paced as parts of snapshots are, so that whatever trains over the same line
comes first. Judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator

import grpc

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.cost.activations import computations
from protomodels_cli.cost.smallest import smallest_stage
from protomodels_cli.doctor.facts import Contact, Failure, Need, Reach
from protomodels_cli.errors import EXIT_REFUSED, UserError
from protomodels_cli.spec.errors import SpecError
from protomodels_cli.spec.load import spec_from
from protomodels_cli.wire.channels import MOST_FROM_COORDINATOR, PIECE, is_loopback
from protomodels_cli.wire.client import Line, Metadata, coordinator_line, in_words, why_failed
from protomodels_cli.wire.join_link import Address, JoinLink, address, find_coordinator, parse_address
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.port_mapping import answers
from protomodels_cli.wire.punch import family_of
from protomodels_cli.wire.relay import relay_trips
from protomodels_cli.wire.seen import seen_by, shared_port
from protomodels_cli.wire.tls import Identity, new_key, public_key_of, server_context
from protomodels_cli.wire.upnp import routers
from protomodels_cli.worker.punch_rules import outside
from protomodels_cli.worker.snapshots.flow import Flow, Throttle
from protomodels_cli.worker.snapshots.pacing import Pace

FIND_SECONDS, CALL_SECONDS = 5.0, 10.0
PINGS = 5
WAY_SECONDS, WAY_BYTES = 2.5, 7 << 20  # one way; the coordinator allows a little more for both together
LEAST = 1e5  # bytes a second, beside whatever else is on the line
WARM = 0.4  # of the bytes, during which the pace is still found


async def look(link: JoinLink, port: int = 0, measure: bool = True) -> Contact:
    """`port`: at which neighbours would dial; 0: any."""
    where = address(link.host, link.port)
    try:
        found, authority = await find_coordinator(link, FIND_SECONDS)
        where = address(found.host, found.port)
        async with coordinator_line(found, authority, MOST_FROM_COORDINATOR) as line:
            return await _with(line, found, authority, port, measure, where)
    except UserError as e:
        what, _, fix = str(e).partition("\n")
        return Contact(
            where, Failure(e.kind, what, fix.strip().removeprefix("fix:").strip(), e.exit_code == EXIT_REFUSED)
        )


async def _with(line: Line, link: JoinLink, authority: bytes, port: int, measure: bool, where: str) -> Contact:
    key = new_key()
    request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=public_key_of(key))
    try:
        before = time.time()
        enrolled = await line.Enrol(request, metadata=(("token", link.token),), timeout=CALL_SECONDS)
        ahead = (before + time.time()) / 2 - enrolled.clock
    except grpc.aio.AioRpcError as e:
        raise in_words(e) from None
    metadata = (("peer", enrolled.peer), ("secret", enrolled.secret))
    try:
        spec = spec_from(json.loads(enrolled.spec_json))
        ways = computations(spec.compute)
        run, need = (
            spec.name,
            Need(
                smallest_stage(spec, lambda m, first, end, after: min(m.total(first, end, after, way) for way in ways)),
                smallest_stage(spec, lambda m, first, end, _: m.saved(first, end)),
            ),
        )
    except (SpecError, ValueError):  # of a package that is missing here: `join` says which
        run, need = "a run whose spec cannot be read here", None
    round_trip, upload, download, why = None, None, None, "not measured"
    if measure:
        try:
            round_trip, upload, download = await _measured(line, metadata)
        except grpc.aio.AioRpcError as e:
            why = f"not measured: {why_failed(e)}"
    identity = Identity(key, enrolled.certificate_pem, authority)
    reach, problem = await _reach(line, metadata, identity, link, port)
    return Contact(
        address=where,
        version=enrolled.version,
        run=run,
        need=need,
        ahead=ahead,
        round_trip=round_trip,
        upload=upload,
        download=download,
        not_measured=why if upload is None else problem,
        reach=reach,
    )


async def _measured(line: Line, metadata: Metadata) -> tuple[float | None, float | None, float | None]:
    """The round trip in seconds, and bits a second to the coordinator and from there."""
    requests: asyncio.Queue[pb.MeasureRequest | None] = asyncio.Queue()

    async def words() -> AsyncIterator[pb.MeasureRequest]:
        while (request := await requests.get()) is not None:
            yield request

    call = line.Measure(words(), metadata=metadata, timeout=4 * WAY_SECONDS)
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        requests.put_nowait(pb.MeasureRequest())
        if await call.read() is grpc.aio.EOF:
            return None, None, None
        trips.append(time.perf_counter() - began)
    padding, rates = os.urandom(PIECE), list[float | None]()
    way = _Way(up=True)

    async def read() -> None:
        while (reply := await call.read()) is not grpc.aio.EOF:
            way.arrived(reply)

    reading = asyncio.create_task(read())  # one for both ways: to cancel a read is to cancel the call
    try:
        for up in (True, False):
            way = _Way(up)
            ends, sent = time.perf_counter() + WAY_SECONDS, 0
            while time.perf_counter() < ends and sent < WAY_BYTES and not reading.done():
                size = await way.flow.turn()
                way.flow.sent(size)
                sent += size
                requests.put_nowait(pb.MeasureRequest(padding=padding[:size]) if up else pb.MeasureRequest(size=size))
            while way.flow.on_the_way and time.perf_counter() < ends + WAY_SECONDS and not reading.done():
                await asyncio.sleep(0.005)
            rates.append(rate_of(way.came))
            if way.flow.on_the_way:
                break  # what comes late would be taken for the other way's
    finally:
        requests.put_nowait(None)
        call.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return min(trips), rates[0], rates[1] if len(rates) > 1 else None


class _Way:
    """Bytes to the coordinator, or from there."""

    def __init__(self, up: bool):
        self.flow, self._up = Flow(Pace(LEAST), lambda: False, Throttle(None)), up
        self.came: list[tuple[float, int]] = []  # when, and bytes until then
        self._total = 0

    def arrived(self, reply: pb.MeasureReply) -> None:
        before = self.flow.on_the_way
        if self._up:
            self.flow.arrived_there(reply.clock)
        else:
            self.flow.arrived_here(reply.clock)
        self._total += before - self.flow.on_the_way
        self.came.append((time.perf_counter(), self._total))


def rate_of(came: list[tuple[float, int]]) -> float | None:
    """Bits a second, from when so many bytes had arrived; None: too little to say. Pure."""
    if not came:
        return None
    late = [(when, total) for when, total in came if total >= WARM * came[-1][1]]
    if len(late) < 2 or late[-1][0] <= late[0][0]:
        return None
    return 8 * (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


async def _keeps_port(observers: list[Address], host: str) -> bool | None:
    """Whether this machine's router shows everybody the same port for one of its own; None: too few have said."""
    try:
        with shared_port(family_of(host)) as kept:
            port = kept.getsockname()[1]
            async with seen_by(observers, family_of(host), port) as seen:
                found = outside(seen)
    except OSError:
        return None
    if isinstance(found, str):
        return False if found == "port_changes" else None
    return True if len(seen) > 1 or found[1] == port else None


async def _maps_by(link: JoinLink) -> str | None:
    return None if is_loopback(link.host) else await answers(routers())


async def _reach(
    line: Line, metadata: Metadata, identity: Identity, link: JoinLink, port: int
) -> tuple[Reach | None, str]:
    """Whether the coordinator can dial this machine; or why that was not tried."""
    host = "127.0.0.1" if is_loopback(link.host) else "0.0.0.0"
    try:
        server = await asyncio.start_server(lambda _, writer: writer.close(), host, port, ssl=server_context(identity))
    except OSError as e:
        return None, f"not checked: cannot listen on port {port} ({e.strerror or e}); is it a peer that has joined?"
    try:
        listening = int(server.sockets[0].getsockname()[1])
        reply = await line.CheckReachability(
            pb.ReachabilityRequest(port=listening), metadata=metadata, timeout=CALL_SECONDS
        )
        trips = tuple((trip.relay, trip.seconds) for trip in await relay_trips(reply.relays))
        observers = [parse_address(relay) for relay, _ in trips] + [(link.host, link.port)]
        keeps, maps_by = await asyncio.gather(_keeps_port(observers, reply.host), _maps_by(link))
        return Reach(reply.host, listening, reply.reachable, reply.reason, trips, keeps, maps_by), ""
    except grpc.aio.AioRpcError as e:
        return None, f"not checked: {why_failed(e)}"
    finally:
        server.close()
