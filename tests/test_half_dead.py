"""Connections whose other end is gone without a word: noticed and replaced within ten seconds, by links and by a peer's
session; and what keeps idle ones alive does not look like abuse to the other side."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
from door_tools import HERE
from test_finding import Coordinator
from test_links import End, identity, message
from test_session import a_session
from waiting import scale_timeouts, until

from protomodels_cli import timeouts
from protomodels_cli.wire.channels import CHANNEL_OPTIONS, HEARTBEATS, SERVER_OPTIONS
from protomodels_cli.wire.client import Line
from protomodels_cli.wire.join_link import address
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.relaying import Relay, RelayLimits
from protomodels_cli.wire.splice import KEEPALIVE
from protomodels_cli.wire.tickets import Ticket
from protomodels_cli.worker import control as controls
from protomodels_cli.worker import problems
from protomodels_cli.worker.control import ControlStream
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.paths import Network, Way
from protomodels_cli.worker.telling import PeerError

pytestmark = pytest.mark.waiting

BOUND = 10.0  # seconds, as docs/reliability.md has it: what our own clocks add up to
BUSY = 60.0  # seconds on a machine that does much else; without our clocks the system takes a quarter of an hour
FORGETFUL = 5.0  # seconds after which the worst routers forget an idle connection


class Hole:
    """A TCP proxy that can stop forwarding, both ways, without closing anything: what is sent is confirmed by the
    system and goes nowhere. Connections that come later may get through."""

    def __init__(self, port: int):
        self._to, self.port, self.passed = port, 0, 0
        self._alive: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed_for_new = False

    def swallow(self) -> None:
        for connection in self._alive:
            connection.clear()

    async def _come_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        alive = asyncio.Event()
        alive.set()
        self._alive.append(alive)
        if self.closed_for_new:
            await asyncio.sleep(60)
        there = await asyncio.open_connection(HERE, self._to)
        self.passed += 1

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                if alive.is_set():
                    sink.write(data)
            if alive.is_set():
                sink.close()

        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Hole]:
        def come_in(*ends: object) -> None:
            self._tasks.add(asyncio.create_task(self._come_in(*ends)))  # type: ignore[arg-type]

        server = await asyncio.start_server(come_in, HERE, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize("way", ["direct", "relayed"])
@pytest.mark.parametrize("busy", [True, False])
def test_a_link_whose_connection_is_swallowed_is_found_again(monkeypatch, way, busy):
    """Direct: the address stays dead, and the link goes on through a relay. Relayed: through the same relay again."""
    scale_timeouts(monkeypatch, 0.3)

    async def story() -> float:
        secret = "s" * 32
        relay = Relay(secret, RelayLimits())
        relay_port = await relay.open(HERE, 0)
        listener = Listener(identity("b"))
        await listener.start(HERE, 0)
        a, b = End("b", True), End("a", False)
        listener.expect(b.link)
        hole = Hole(listener.port if way == "direct" else relay_port)
        async with hole.open():

            def route(name: str, dials: bool) -> pb.Route:
                ticket = Ticket("run", "m", name, int(time.time()) + 600).signed(secret, "dial" if dials else "accept")
                at = relay_port if way == "direct" or not dials else hole.port
                return pb.Route(
                    way=pb.Route.DIAL if dials else pb.Route.LISTEN,
                    ticket="t",
                    candidates=[pb.Candidate(host=HERE, port=hole.port, kind="lan")] * (dials and way == "direct"),
                    relays=[pb.Relay(host=HERE, port=at, ticket=ticket)],
                    unlikely=way == "relayed",
                )

            ways = [
                Way(
                    end.link,
                    route(name, dials),
                    Network(partial(identity, name), port, lambda: (HERE, 1), None),
                    lambda *_: None,
                )
                for end, name, dials, port in ((a, "a", True, Listener(identity("a"))), (b, "b", False, listener))
            ]
            running = [asyncio.create_task(one.run()) for one in ways]
            try:
                await until(lambda: a.link.mended.is_set() and b.link.mended.is_set())
                assert (a.link.path == "lan") == (way == "direct")
                await asyncio.sleep(0.5)
                hole.swallow()
                hole.closed_for_new = way == "direct"
                began = time.monotonic()
                if busy:
                    a.link.send(message(microbatch=1))
                await until(lambda: a.link.streams > 1 and b.link.streams > 1, "it was not found again", seconds=BUSY)
                took = time.monotonic() - began
                if not busy:
                    a.link.send(message(microbatch=1))
                b.link.send(message("backward"))
                await until(lambda: b.got and a.got)
                assert [m.microbatch for m in b.got] == [1], "once, though one stream took it and lost it"
                return took
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                for one in ways:
                    await one.close()
                await listener.stop()
                await relay.close()

    print(f"{way}, {'busy' if busy else 'idle'}: {asyncio.run(story()):.1f} s")


def test_a_session_whose_connection_is_swallowed_goes_on_over_another(tmp_path):
    async def story() -> float:
        leader = Coordinator()
        async with leader.open() as port, Hole(port).open() as hole:
            line = Line([(HERE, hole.port)], lambda where: grpc.aio.insecure_channel(address(*where), CHANNEL_OPTIONS))
            session = a_session(tmp_path, line=line)

            async def introduce() -> pb.Register:
                return pb.Register()

            running = asyncio.create_task(session.run(introduce))
            await until(lambda: session._control.connected)
            hole.swallow()
            began = time.monotonic()
            await until(lambda: leader.registered == 2, "it did not register again", seconds=BUSY)
            took = time.monotonic() - began
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await line.close()
            return took

    print(f"session: {asyncio.run(story()):.1f} s")


def test_a_stream_that_ends_while_the_peer_writes_was_closed_by_the_coordinator():
    """As a peer finds it that was stopped for a lease, and writes as soon as it may go on. gRPC calls that an internal
    error of its own, now and then: which of the two is noticed first is chance."""

    class HangsUp(rpc.PeeringServicer):
        async def Session(self, requests: AsyncIterator[pb.PeerMessage], context: object) -> None:
            await anext(aiter(requests))

    async def reason_of_one(port: int) -> problems.Loss:
        line = Line([(HERE, port)], lambda where: grpc.aio.insecure_channel(address(*where), CHANNEL_OPTIONS))
        control = ControlStream(line, (), 5.0, 5.0, asyncio.get_running_loop().create_future(), lambda loss: None)
        beat = pb.PeerMessage(heartbeat=pb.Heartbeat())

        async def introduce() -> list[pb.PeerMessage]:
            return [beat] * 200

        async def obey(message: pb.CoordinatorMessage) -> None:
            raise AssertionError("nobody says anything")

        with pytest.raises(PeerError) as ended:
            await control.run(introduce, obey)
        await line.close()
        assert isinstance(ended.value.problem, problems.NeverConnected)
        return ended.value.problem.reason

    async def story() -> list[problems.Loss]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_PeeringServicer_to_server(HangsUp(), server)
        port = server.add_insecure_port(f"{HERE}:0")
        await server.start()
        try:
            return [await reason_of_one(port) for _ in range(40)]
        finally:
            await server.stop(None)

    assert {*asyncio.run(story())} == {problems.ConnectionClosed()}


@pytest.mark.parametrize(
    ("code", "detail", "reason"),
    [
        (grpc.StatusCode.INTERNAL, "x", problems.ConnectionClosed()),  # with gRPC's words for it
        (grpc.StatusCode.UNAVAILABLE, "x\ny", problems.NetworkFailed("x")),
        (grpc.StatusCode.UNAVAILABLE, "", problems.ConnectionClosed()),
    ],
)
def test_what_a_failed_call_says_of_the_connection(code, detail, reason):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=detail)
    assert controls._failure(error) == reason


def test_a_connection_that_was_left_ends_with_its_last_call():
    """Or a peer that reconnects time and again uses up what its address may have at the coordinator's door."""

    async def story() -> None:
        server, began, finish = grpc.aio.server(), asyncio.Event(), asyncio.Event()

        async def wait(request: bytes, context: object) -> bytes:
            if request == b"slow":
                began.set()
                await finish.wait()
            return request

        handler = grpc.unary_unary_rpc_method_handler(wait)
        server.add_registered_method_handlers("t.T", {"Wait": handler})
        port = server.add_insecure_port(f"{HERE}:0")
        await server.start()
        made: list[grpc.aio.Channel] = []

        def channel(where: tuple[str, int]) -> grpc.aio.Channel:
            made.append(grpc.aio.insecure_channel(address(*where), CHANNEL_OPTIONS))
            return made[-1]

        def is_shut(channel: grpc.aio.Channel) -> bool:
            return channel.get_state() == grpc.ChannelConnectivity.SHUTDOWN

        line = Line([(HERE, port)], channel)
        for request in (b"slow", b"quick"):
            assert line.Renew
            call = made[-1].unary_unary("/t.T/Wait")(request)
            if request == b"slow":
                slow = call
                await began.wait()
            else:
                await call
            line.renew()
        await until(lambda: is_shut(made[1]), "a connection without calls was kept")
        assert not is_shut(made[0]), "a call was cut off"
        finish.set()
        assert await slow == b"slow"
        await until(lambda: is_shut(made[0]) and not line._left, "it was kept after its last call")
        await line.close()
        await server.stop(None)

    asyncio.run(story())


def of(options: list[tuple[str, int]], name: str) -> int:
    return dict(options)[f"grpc.{name}"]


def test_idle_connections_say_something_before_a_router_forgets_them_and_never_too_often():
    assert timeouts.LINK_ASK_EVERY < FORGETFUL
    lease = 5.0
    assert lease / HEARTBEATS < FORGETFUL
    assert KEEPALIVE["TCP_KEEPIDLE"] < FORGETFUL
    # A server counts pings that come sooner than it allows; after two it ends the connection (too_many_pings).
    for ours, theirs in ((CHANNEL_OPTIONS, SERVER_OPTIONS), (SERVER_OPTIONS, SERVER_OPTIONS)):
        pings = of(ours, "keepalive_time_ms")
        assert pings >= 2 * of(theirs, "http2.min_ping_interval_without_data_ms")
    most = of(CHANNEL_OPTIONS, "keepalive_timeout_ms"), KEEPALIVE["TCP_USER_TIMEOUT"]
    assert max(most) / 1000 + timeouts.LINK_ASK_EVERY < BOUND


@pytest.mark.parametrize("agree", [True, False])
def test_an_idle_call_lives_on_pings_that_the_server_allows(agree):
    """The options of both sides at a twentieth of their times; and, to see that it would be noticed, without what the
    server allows."""
    fast = 20

    def sooner(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return [(name, value // fast if name.endswith("_ms") else value) for name, value in options]

    async def story() -> grpc.StatusCode | None:
        server_options = [
            (name, value)
            for name, value in sooner(SERVER_OPTIONS)
            if agree or ("min_ping" not in name and "keepalive" not in name)
        ]
        if agree:  # it may take a busy machine longer than a twentieth to answer
            server_options.append(("grpc.keepalive_timeout_ms", 5_000))
        server = grpc.aio.server(options=[*server_options, ("grpc.max_connection_idle_ms", 60_000)])

        async def wait(request: bytes, context: object) -> bytes:
            await asyncio.sleep(60)
            return request

        handler = grpc.unary_unary_rpc_method_handler(wait)
        server.add_registered_method_handlers("t.T", {"Wait": handler})
        port = server.add_insecure_port(f"{HERE}:0")
        await server.start()
        # gRPC itself sends few pings on an idle connection; here it sends all.
        options = [*sooner(CHANNEL_OPTIONS), ("grpc.keepalive_timeout_ms", 5_000)]
        options.append(("grpc.http2.max_pings_without_data", 0))
        async with grpc.aio.insecure_channel(f"{HERE}:{port}", options) as channel:
            call = channel.unary_unary("/t.T/Wait")(b"")
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(8):
                    await asyncio.shield(asyncio.wait([asyncio.ensure_future(call.code())]))
            ended = await call.code() if call.done() else None
            call.cancel()
        await server.stop(None)
        return ended

    assert asyncio.run(story()) == (None if agree else grpc.StatusCode.UNAVAILABLE)
