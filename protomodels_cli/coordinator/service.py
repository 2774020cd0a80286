"""The coordinator's gRPC service for peers: joining, sessions and heartbeats, uploads. The owner's is in owner.py.

Knows peers' sessions; who a caller is was settled before (gate.py). Turns requests into events for the machine; must
not know what an event means.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, assert_never

import grpc

from protomodels_cli.coordinator import bad_requests, calls, events, message_fields, refusals, sessions
from protomodels_cli.coordinator.admission import DoorLimits
from protomodels_cli.coordinator.auditing import Audits
from protomodels_cli.coordinator.bad_requests import BadRequest
from protomodels_cli.coordinator.dial_back import dial_back
from protomodels_cli.coordinator.door import Door
from protomodels_cli.coordinator.doorkeeper import Doorkeeper
from protomodels_cli.coordinator.gate import GATE_OPTIONS, Caller, Gate, Right
from protomodels_cli.coordinator.joining import Joining
from protomodels_cli.coordinator.measuring import Measuring, NotNow
from protomodels_cli.coordinator.messages import event_of, peer_of, port_at, ports_of
from protomodels_cli.coordinator.notices import Unwanted
from protomodels_cli.coordinator.owner import Desk
from protomodels_cli.coordinator.reasons import (
    ConnectionClosed,
    InvalidMessage,
    NoHeartbeat,
    NotReading,
    NotRenewed,
    TooManyMessages,
)
from protomodels_cli.coordinator.routes import Routes
from protomodels_cli.coordinator.run import Run
from protomodels_cli.coordinator.run_dir import RunDir
from protomodels_cli.coordinator.sessions import ControlStream, EnrolledPeer, most_waiting, watch
from protomodels_cli.coordinator.snapshots.copies import OutOfReach
from protomodels_cli.coordinator.snapshots.failures import NotWritten
from protomodels_cli.coordinator.snapshots.uploads import Damaged, Later, Refused, Uploads
from protomodels_cli.coordinator.tokens import OWN
from protomodels_cli.coordinator.turned_away import RefusedCalls
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.addresses import MOST_OWN, is_address, is_private, network_of
from protomodels_cli.wire.channels import SERVER_OPTIONS
from protomodels_cli.wire.parts import REFUSED
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.rates import Buckets, Rate
from protomodels_cli.wire.tickets import RelayLink
from protomodels_cli.wire.tls import COORDINATOR_NAME, Identity, client_context

MOST_ABSENT = 1000  # of whom something is remembered
MOST_DISMISSED = 10_000
MOST_UPLOADS = 2  # of one peer: a basis and a part of a snapshot may fall together
FAILURES_SECONDS = 32.0  # in which as many calls with a token may fail from one network as may connect from there
TOO_EARLY = Rate(per_second=0.1, burst=4)
LEAST_FAILURES = 16  # of those: where one connection is allowed, a mistake or two are nothing bad yet
LOOK_AGAIN = 1.0  # seconds until a peer that opens too many sessions may open another
SESSION_WITHIN = 600.0  # seconds after a peer's first call


class Service(rpc.PeeringServicer):
    def __init__(
        self,
        spec: RunSpec,
        run_dir: RunDir,
        run: Run,
        uploads: Uploads,
        status: Callable[[], pb.RunStatus],
        audits: Audits | None = None,
        relays: Sequence[RelayLink] = (),
    ):
        self._spec, self._run_dir = spec, run_dir
        self.routes = Routes(lambda: self.door, run_dir.shown_as, relays)
        self._run, self._uploads, self._audits, self._status = run, uploads, audits, status
        self._refused_calls = RefusedCalls()
        self._enrolled: dict[str, EnrolledPeer] = {}
        self._most_waiting, self._measuring = most_waiting(spec), Measuring()
        self._untaken: dict[int, EnrolledPeer] = {}  # whose events wait for the machine
        self._watching: asyncio.Task[None] | None = None
        self._identity: Identity = run_dir.authority.issue_with_key(COORDINATOR_NAME)
        self._dialling = client_context(self._identity)
        self.doorkeeper = Doorkeeper(run_dir)
        self._joining = Joining(spec, run_dir, self.doorkeeper)
        most = max(LEAST_FAILURES, spec.limits.connections_per_address)
        self._failures = Buckets(Rate(most / FAILURES_SECONDS, most))  # of calls with a token, by network
        self._too_early = Buckets(TOO_EARLY)  # calls while there are too many, by connection
        self._dismissed: dict[str, None] = {}  # for good: they are not let in again under these names
        self._server = grpc.aio.server(interceptors=[Gate(self)], options=[*SERVER_OPTIONS, *GATE_OPTIONS])
        rpc.add_PeeringServicer_to_server(self, self._server)
        rpc.add_OperatorServicer_to_server(Desk(self.doorkeeper, run, status), self._server)
        self.door: Door | None = None

    async def open(self, host: str, port: int) -> int:
        credentials = grpc.ssl_server_credentials([(self._identity.key_pem, self._identity.certificate_pem)])
        inner = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        most = self._spec.limits
        limits = DoorLimits(most.connections, most.connections_per_address)
        self.door = Door(self._identity.authority_pem, ("127.0.0.1", inner), limits)
        port = await self.door.open(host, port)
        watching = watch(self._enrolled, most.lease_seconds, self._give_up, self.doorkeeper.now)
        self._watching = asyncio.create_task(watching)
        return port

    async def close(self) -> None:
        """Send what is still queued, then close all streams."""
        if self._watching is not None:
            self._watching.cancel()
        for peer in self._enrolled.values():
            if peer.stream is not None:
                peer.stream.end()
        await self._server.stop(grace=2)
        if self.door is not None:
            await self.door.close()

    def send(self, peer: str, **body: Any) -> None:
        known = self._enrolled.get(peer)
        if known is None or known.stream is None or known.unannounced:
            return
        stream = known.stream
        stream.send(pb.CoordinatorMessage(**body))
        known.was_sent()
        if stream.outbox.qsize() > self._most_waiting and not stream.refused:
            stream.refused = True
            self._run.hear(events.Trouble(peer, NotReading(stream.outbox.qsize())))

    def dismiss(self, peer: str, for_good: bool, **body: Any) -> None:
        """Send it the reason and close its stream."""
        self.send(peer, **body)
        if (known := self._enrolled.get(peer)) is not None:
            if for_good:
                self._dismissed = dict([*self._dismissed.items(), (peer, None)][-MOST_DISMISSED:])
            if known.stream is not None:
                known.stream.end_soon()

    def joined_processed(self, peer: str) -> None:
        """The machine has processed the Joined event of the newest stream. What was decided before that was meant for
        the stream before, and is not sent on the new one."""
        if peer in self._enrolled:
            self._enrolled[peer].unannounced -= 1

    # Leases

    def _give_up(self, peer: str, stream: ControlStream) -> None:
        expired = self._enrolled[peer].until <= self.doorkeeper.now()
        why = NotRenewed() if expired else NoHeartbeat(self._spec.limits.lease_seconds)
        self._end(peer, stream, events.Left(peer, why))

    def _end(self, peer: str, stream: ControlStream, event: events.Left) -> None:
        """A stream has ended: the peer is gone, unless it has opened another."""
        known = self._enrolled.get(peer)
        if known is not None and known.stream is stream:
            known.stream, known.since = None, time.monotonic()
            stream.end()
            self._run.hear(event)

    # Joining

    def refusal(self, right: Right, context: grpc.aio.ServicerContext) -> refusals.Refusal | None:
        """Why the caller may not make this call."""
        keeper = self.doorkeeper
        match right.shows:
            case "token":
                return keeper.may_come(calls.metadata(context, "token"))
            case "owner":
                return keeper.may_decide(calls.metadata(context, "owner"))
            case "peer":
                return self._peers_refusal(context)
            case "any":  # a peer may look on, also when the link is another by now
                refusal = keeper.may_come(calls.metadata(context, "token"))
                if refusal is None or keeper.may_decide(calls.metadata(context, "owner")) is None:
                    return None
                return self._peers_refusal(context) if calls.metadata(context, "peer") else refusal
            case _:
                assert_never(right.shows)

    def _peers_refusal(self, context: grpc.aio.ServicerContext) -> refusals.Refusal | None:
        peer = calls.metadata(context, "peer")
        refusal = self.doorkeeper.may_call(peer, calls.metadata(context, "secret"))
        return refusals.Dismissed() if refusal is None and peer in self._dismissed else refusal

    def believe(self, right: Right, context: grpc.aio.ServicerContext) -> Caller:
        if self.door is not None:
            self.door.known(calls.port(context))
        connection = self._connection(context)
        if right.shows != "peer":
            return Caller(self._network(context), connection)
        peer = calls.metadata(context, "peer")
        if peer not in self._enrolled:
            self._forget_the_absent()
            self._enrolled[peer] = EnrolledPeer(time.monotonic())
        known = self._enrolled[peer]
        known.until = max(known.until, self.doorkeeper.end_of(calls.metadata(context, "secret")))
        return Caller(peer, connection)

    def failed(self, context: grpc.aio.ServicerContext) -> None:
        """An honest caller tries again now and then. A thousand such calls a second would take a whole core: then each
        costs its sender the connection, and with it a handshake. Others from there have done nothing, and one that
        came when there were too many has only called too often over its own connection."""
        if self.door is None:
            return
        crowded, now = calls.was_busy(context), time.monotonic()
        counted, name = (self._too_early, str(self._connection(context))) if crowded else (self._failures, "")
        if not counted.take(name or self._network(context), now):
            self.door.cut(calls.port(context))

    def turned_away(self, context: grpc.aio.ServicerContext, what: Unwanted, peer: str = "") -> None:
        if (notice := self._refused_calls.note(self._network(context), what, peer)) is not None:
            self._run.tell(notice)

    async def Enrol(self, request: pb.EnrolRequest, context: grpc.aio.ServicerContext) -> pb.EnrolReply:
        here = sum(known.stream is not None for known in self._enrolled.values())
        return await self._joining.enrol(request, context, self._address(context), self._connection(context), here)

    async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.RenewReply:
        reply, until = await self._joining.renew(request, context)
        self._enrolled[calls.metadata(context, "peer")].until = until
        return reply

    def _token_of(self, peer: str) -> str:
        came_with = self.doorkeeper.guests.token_of(peer)
        return OWN if came_with is None else came_with.id

    def _forget_the_absent(self) -> None:
        """Peers that made a call and opened no session, or left. One that comes back is known by its secret."""
        absent = [peer for peer, known in self._enrolled.items() if known.stream is None and not known.uploads]
        long_ago = time.monotonic() - SESSION_WITHIN
        surplus = len(absent) - MOST_ABSENT
        for n, peer in enumerate(absent):
            if n < surplus or self._enrolled[peer].since < long_ago:
                del self._enrolled[peer]

    def _address(self, context: grpc.aio.ServicerContext) -> str:
        """The caller's real address: gRPC sees the door's loopback connection only."""
        return (self.door.address_of(calls.port(context)) if self.door else None) or ""

    def _connection(self, context: grpc.aio.ServicerContext) -> int:
        return self.door.number_of(calls.port(context)) if self.door else 0

    def _network(self, context: grpc.aio.ServicerContext) -> str:
        address = self._address(context)
        return network_of(address) if address else ""

    def round_trips(self) -> dict[str, float]:
        """Seconds from here to each peer and back, as far as the system says."""
        streams = {peer: known.stream for peer, known in self._enrolled.items() if known.stream is not None}
        found = {peer: self.door.round_trip_of(s.port) if self.door else None for peer, s in streams.items()}
        return {peer: seconds for peer, seconds in found.items() if seconds is not None}

    async def CheckReachability(
        self, request: pb.ReachabilityRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReachabilityReply:
        peer, host = calls.metadata(context, "peer"), self._address(context)
        others = [other for other in request.hosts[:MOST_OWN] if is_address(other) and not is_private(other)]
        hosts = list(dict.fromkeys([host, *others]))
        found = await asyncio.gather(*(dial_back(self._dialling, peer, at, port_at(at, request)) for at in hosts))
        reached = frozenset(at for at, reason in zip(hosts, found, strict=True) if not reason)
        if peer in self._enrolled:
            self._enrolled[peer].seen, self._enrolled[peer].reached = (host, ports_of(request)), reached
        reply = pb.ReachabilityReply(reachable=bool(reached), host=host, relays=self.routes.relays)
        reply.reason = "" if reached else found[0]
        return reply

    async def Measure(
        self, request_iterator: AsyncIterator[pb.MeasureRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.MeasureReply]:
        first = await anext(aiter(request_iterator), None)
        try:
            async for reply in self._measuring.answer(
                self._address(context), first or pb.MeasureRequest(), request_iterator
            ):
                yield reply
        except NotNow as e:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(e))

    # The run

    async def Session(
        self, request_iterator: AsyncIterator[pb.PeerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        first = await anext(aiter(request_iterator), None)
        register = first.register if first is not None and first.HasField("register") else None
        peer, address = calls.metadata(context, "peer"), self._address(context)
        if register is None or register.spec_sha256 != self._joining.spec_sha256:
            await calls.refuse(context, refusals.OtherSpec())
            return
        known = self._enrolled[peer]
        while not known.may_open(time.monotonic()):
            await asyncio.sleep(LOOK_AGAIN)
            if (refusal := self._peers_refusal(context)) is not None:  # it may have been kicked meanwhile
                await calls.refuse(context, refusal)
                return
        self._enrolled[peer] = known
        stream = ControlStream(address, calls.port(context))
        reached = known.reached if known.seen == (address, ports_of(register)) else ()
        try:
            message_fields.check(register, self._spec)
            token = self.doorkeeper.joined_with(peer)
            joined = events.Joined(peer_of(peer, register, address, reached, time.time(), *token))
        except ValueError as e:
            await calls.reject(context, bad_requests.InvalidRegistration(str(e)))
        if known.stream is not None:  # of a connection that broke unnoticed
            known.stream.end()
        known.stream, stream.serving = stream, asyncio.current_task()
        known.unannounced += 1
        self._run.hear(joined)
        reading = asyncio.create_task(self._receive(peer, stream, request_iterator))
        reading.add_done_callback(lambda _: stream.outbox.put_nowait(None))  # the peer has closed the stream
        try:
            with self.door.session(stream.port) if self.door else contextlib.nullcontext():
                while (message := await stream.outbox.get()) is not None:
                    yield message
        finally:
            reading.cancel()
            self._end(peer, stream, events.Left(peer, ConnectionClosed()))

    async def _receive(self, peer: str, stream: ControlStream, messages: AsyncIterator[pb.PeerMessage]) -> None:
        async for message in messages:
            stream.last_received = time.monotonic()
            if self._enrolled[peer].stream is not stream:
                return  # the peer has opened another stream
            if not self._enrolled[peer].may_say(message, stream.last_received):
                stream.refused = True
                self._joining.cooling.begin(self._token_of(peer), stream.address, stream.last_received)
                self._run.hear(events.Trouble(peer, TooManyMessages(sessions.FROM_PEER.per_second)))
            if stream.refused:
                await asyncio.Event().wait()  # nothing more is read: the stream ends once the peer has been told why
            try:
                event = event_of(peer, message, self._spec)
            except ValueError as e:
                event = events.Trouble(peer, InvalidMessage(str(e)))
            if event is not None:
                await self._pass_on(peer, stream, event)

    async def _pass_on(self, peer: str, stream: ControlStream, event: events.Event | events.Aside) -> None:
        """Returns once there is room for more from this peer: what it says meanwhile waits on its own machine."""
        known = self._enrolled[peer]
        self._untaken[id(event)] = known
        known.untaken += 1
        self._run.hear(event)
        while known.untaken >= sessions.MOST_UNTAKEN:
            await asyncio.sleep(sessions.UNTAKEN_SECONDS)
            stream.last_received = time.monotonic()  # it is not the peer that is silent

    def taken(self, event: events.Event | events.Aside) -> None:
        """The machine has processed this event."""
        if (known := self._untaken.pop(id(event), None)) is not None:
            known.untaken -= 1

    async def Offer(self, request: pb.UploadHeader, context: grpc.aio.ServicerContext) -> pb.OfferReply:
        peer = calls.metadata(context, "peer")
        try:
            return await self._uploads.offer(peer, request)
        except BadRequest as e:
            await calls.reject(context, e.reason)
        except Refused as e:
            await context.abort(REFUSED, str(e))
        except Later as e:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(e))
        except OSError as e:
            why = e.strerror or str(e)
            self._run.hear(events.PartFailed(None, request.lineage, request.step, request.stage, NotWritten(why)))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the coordinator cannot write the part: {why}")
        return pb.OfferReply()

    async def Upload(self, request_iterator: AsyncIterator[pb.UploadChunk], context: grpc.aio.ServicerContext) -> None:
        peer = calls.metadata(context, "peer")
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("header"):
            await calls.reject(context, bad_requests.NoHeader())
            return
        known = self._enrolled[peer]
        if known.uploads >= MOST_UPLOADS:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"a peer may have {MOST_UPLOADS} uploads at a time")
        known.uploads += 1
        try:
            frames = first.header.kind == pb.UploadHeader.FRAMES and self._audits
            receiver = frames or self._uploads
            await receiver.receive(peer, first.header, _confirmed(request_iterator, context))
        except BadRequest as e:
            await calls.reject(context, e.reason)
        except Refused as e:
            await context.abort(REFUSED, str(e))
        except Later as e:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(e))
        except Damaged as e:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(e))
        finally:
            known.uploads -= 1

    async def Fetch(
        self, request_iterator: AsyncIterator[pb.FetchRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Piece]:
        first = await anext(aiter(request_iterator), None)
        peer = calls.metadata(context, "peer")
        if first is None:
            return
        await self._check_need(peer, first, context)
        try:
            read = self._audits.read if first.audit and self._audits else self._uploads.read_part
            async for piece in read(first, request_iterator):
                yield pb.Piece(data=piece, clock=time.monotonic())
        except BadRequest as e:
            await calls.reject(context, e.reason)
        except FileNotFoundError as e:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(e))
        except OutOfReach as e:
            self._run.hear(events.StoreAway(peer, first.lineage, first.step, first.stage, str(e)))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the store cannot be reached: {e}")
        except OSError as e:  # and not just once
            await context.abort(grpc.StatusCode.DATA_LOSS, f"the coordinator cannot read the part: {e.strerror or e}")

    async def Locate(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> pb.Location:
        await self._check_need(calls.metadata(context, "peer"), request, context)
        return pb.Location(url=await self._uploads.locate(request))

    async def _check_need(self, peer: str, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """End the call of a peer that was not told to use what it fetches. One that fetches already goes on."""
        refusal: refusals.NotNeeded | None
        if request.audit:
            asked = self._audits is not None and self._audits.is_asked(peer, request.audit)
            refusal = None if asked else refusals.AuditNotAsked(request.audit)
        else:
            audited = self._audits.parts_of(peer) if self._audits is not None else ()
            refusal = self._uploads.refusal(peer, request, audited)
        if refusal is not None:
            self.turned_away(context, "parts", peer)
            await calls.refuse(context, refusal)


async def _confirmed(
    chunks: AsyncIterator[pb.UploadChunk], context: grpc.aio.ServicerContext
) -> AsyncIterator[pb.UploadChunk]:
    """The chunks, each confirmed once it was taken, with the time at which it came."""
    async for chunk in chunks:
        came = time.monotonic()
        yield chunk
        await context.write(pb.UploadReply(clock=came))
