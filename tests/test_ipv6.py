"""Listener, dialler, relay, door and punching over IPv6, on ::1."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial

import pytest
from door_tools import in_loop
from test_links import End, identity, message
from waiting import until

from protomodels_cli.coordinator.admission import DoorLimits
from protomodels_cli.coordinator.door import Door
from protomodels_cli.wire import punch
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.relaying import Relay, RelayLimits
from protomodels_cli.wire.seen import seen_by, shared_port
from protomodels_cli.wire.tickets import Ticket
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.paths import Network, Way

HERE = "::1"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((HERE, 0))
        return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("how", ["direct", "relayed"])
@in_loop
async def test_a_link_opens_over_ipv6_and_a_relayed_one_is_punched(how):
    secret = "s" * 32
    relay = Relay(secret, RelayLimits())
    relay_port = await relay.open(HERE, 0)
    listeners = {"a": Listener(identity("a")), "b": Listener(identity("b"))}
    for listener in listeners.values():
        await listener.start("::", 0)
    ends = {"a": End("b", True), "b": End("a", False)}
    ways = []
    for name, other in ("ab", "ba"):
        listeners[name].expect(ends[name].link)
        dials = name == "a"
        ticket = Ticket("run", "m", name, int(time.time()) + 600).signed(secret, "dial" if dials else "accept")
        port = listeners[other].port if how == "direct" else 1  # nobody is there
        route = pb.Route(
            way=pb.Route.DIAL if dials else pb.Route.LISTEN,
            ticket="t",
            candidates=[pb.Candidate(host=HERE, port=port, kind="public")],
            relays=[pb.Relay(host=HERE, port=relay_port, ticket=ticket)],
            unlikely=how == "relayed",
        )
        network = Network(partial(identity, name), listeners[name], lambda: (HERE, 1), None)
        ways.append(Way(ends[name].link, route, network, lambda *_: None))
    running = [asyncio.create_task(way.run()) for way in ways]
    try:
        a, b = ends["a"], ends["b"]
        await until(lambda: a.link.mended.is_set() and b.link.mended.is_set())
        assert a.link.path == ("public" if how == "direct" else f"relay [::1]:{relay_port}")
        if how == "relayed":
            await until(lambda: a.link.path == b.link.path == "punched")
        a.link.send(message())
        await until(lambda: b.got)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for way in ways:
            await way.close()
        for listener in listeners.values():
            await listener.stop()
        await relay.close()


@in_loop
async def test_the_door_says_where_it_sees_a_caller_over_ipv6(authority):
    door = Door(authority.certificate_pem, ("127.0.0.1", 1), DoorLimits())
    port = await door.open(HERE, 0)
    with shared_port(socket.AF_INET6) as kept:
        own = kept.getsockname()[1]
        async with seen_by([(HERE, port)], punch.family_of(HERE), own) as seen:
            assert seen == [(HERE, own)]
    await door.close()
