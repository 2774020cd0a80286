"""Two ends that connect to each other at once: rules by tables and properties, the rest over real sockets and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from functools import partial
from types import SimpleNamespace

import pytest
from door_tools import HERE, a_door, answer_to, in_loop
from hypothesis import given
from hypothesis import strategies as st
from test_links import End, identity, message
from waiting import until

from protomodels_cli import timeouts
from protomodels_cli.coordinator.admission import DoorLimits
from protomodels_cli.wire import punch, relaying, seen
from protomodels_cli.wire.path import checked_punch, told
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.relaying import Relay, RelayLimits
from protomodels_cli.wire.seen import ASK_SEEN, read_seen, seen_at, seen_by, shared_port
from protomodels_cli.wire.tickets import Ticket
from protomodels_cli.worker import punch_rules
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.paths import Network, Way
from protomodels_cli.worker.punch_rules import Turns, checked_why, family_hosts, outside, target
from protomodels_cli.worker.punching import Punching

ports = st.integers(1, 65535)
hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


# Rules


@given(hosts, ports)
def test_what_an_observer_answers_is_read_as_it_was_meant(host, port):
    found = read_seen(seen_at((host, port, 0, 0)))
    assert found is not None
    assert found[1] == port
    assert found[0] in (host, host.removeprefix("::ffff:")) or ":" in host


@given(st.binary(max_size=80))
def test_what_is_no_answer_is_none(answer):
    assert read_seen(answer) is None or answer.startswith(b"SEEN ")


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([], "not_seen"),
        ([("198.51.100.1", 5)], ("198.51.100.1", 5)),
        ([("198.51.100.1", 5), ("198.51.100.1", 5)], ("198.51.100.1", 5)),
        ([("198.51.100.1", 5), ("198.51.100.1", 6)], "port_changes"),
        ([("198.51.100.1", 5), ("198.51.100.2", 5)], "port_changes"),
    ],
)
def test_a_port_can_be_met_where_all_observers_see_the_same(seen, found):
    assert outside(seen) == found


@given(hosts, st.integers(0, 70_000), st.lists(hosts, max_size=3))
def test_nobody_is_dialled_but_where_the_coordinator_has_seen_the_neighbour(host, port, known):
    to = target(host, port, known)
    assert (to == (host, port)) == (host in known and 1 <= port <= 65535)
    assert (to == "not_listening") == (not known)


def test_both_ends_take_addresses_of_one_family():
    assert family_hosts(["2001:db8::1", "198.51.100.1", "2001:db8::2"]) == ["198.51.100.1"]
    assert family_hosts(["2001:db8::1"]) == ["2001:db8::1"]


@given(st.lists(st.sampled_from(["not_opened", "no_answer", "port_changes_here"]), min_size=1, max_size=30))
def test_failures_are_left_alone_for_longer_and_longer(whys):
    turns, now, waits = Turns(), 1000.0, []
    for why in whys:
        assert turns.is_due(now)
        turns.failed(why, now)
        assert turns.why == why
        before = now
        while not turns.is_due(now):
            now += 1.0
        waits.append(now - before)
        assert punch_rules.AGAIN <= waits[-1] <= punch_rules.CHANGES_LONGEST + 1
        if why.startswith("port_changes"):
            assert waits[-1] >= punch_rules.CHANGES_AGAIN
    same = [wait for wait, why in zip(waits, whys, strict=True) if why == "not_opened"]
    assert same == sorted(same)


def test_a_connection_that_lived_long_is_looked_for_again_at_once_and_one_that_broke_soon_is_a_failure():
    turns = Turns()
    turns.broke(punch_rules.SHORT_LIFE - 1, 100.0)
    assert not turns.is_due(100.0 + punch_rules.AGAIN - 1)
    turns.broke(punch_rules.SHORT_LIFE + 1, 200.0)
    assert turns.is_due(200.0)


def test_a_neighbour_that_makes_offers_without_end_is_answered_seldom():
    turns = Turns()
    answered = [turns.answers(now / 10) for now in range(200)]
    assert sum(answered) == 20 / timeouts.PUNCH_OFFERS_EVERY


def test_what_a_neighbour_or_peer_says_is_one_of_the_kinds_that_there_are():
    assert checked_why("port_changes") == "port_changes"
    assert checked_why("<script>") == "not_seen"
    assert checked_punch(told("port_changes", here=True)) == "port_changes_here"
    assert checked_punch("not_opened") == "not_opened"
    assert checked_punch("not_opened_here") == checked_punch("anything") == ""


# Observers


@in_loop
async def test_the_door_and_a_relay_say_where_a_local_port_is_seen(authority):
    relay = Relay("s" * 32, RelayLimits())
    async with a_door(authority) as (door, port):
        relay_port = await relay.open(HERE, 0)
        with shared_port(socket.AF_INET) as kept:
            own = kept.getsockname()[1]
            observers = [(HERE, port), (HERE, relay_port), (HERE, 1)]  # nobody is at the last
            async with seen_by(observers, socket.AF_INET, own) as found:
                assert found == [(HERE, own), (HERE, own)]
        assert not door.refused
        await until(lambda: door.connections == 0)
        await relay.close()


@in_loop
async def test_questions_are_limited_and_counted_as_strangers_are(authority, monkeypatch):
    limits = DoorLimits(connections=64, connections_per_address=4, line_seconds=0.0)  # eight at once, and one a second
    async with a_door(authority, limits=limits) as (door, port):
        answers = [await answer_to(port, ASK_SEEN) for _ in range(12)]
        assert sum(answer.startswith(b"SEEN ") for answer in answers) <= 9
        assert door.refused["too_many_from_one_address"] >= 3
    monkeypatch.setattr(relaying, "ASK_SECONDS", 1.0)
    for limits in (RelayLimits(questions_a_second=4), RelayLimits(questions_per_network=4)):
        relay = Relay("s" * 32, limits)
        port = await relay.open(HERE, 0)
        answers = [await answer_to(port, ASK_SEEN) for _ in range(12)]
        assert 1 <= sum(answer.startswith(b"SEEN ") for answer in answers) <= 6
        assert relay.books.refused["too_many_questions"] >= 6
        await relay.close()


def test_who_asks_without_end_uses_up_nobody_elses_questions():
    relay = Relay("s" * 32, RelayLimits(questions_a_second=100, questions_per_network=4))
    began = time.monotonic()
    for second in range(60):
        asked = [relay._may_ask("198.51.100.1", began + second + i / 1000) for i in range(1000)]
        assert sum(asked) <= 5 or second < 1
        assert relay._may_ask(f"203.0.113.{second}", began + second + 1)


# Both ends


@in_loop
async def test_two_that_connect_to_each_other_at_once_have_one_connection():
    with shared_port(socket.AF_INET) as a, shared_port(socket.AF_INET) as b:
        here, there = a.getsockname()[1], b.getsockname()[1]
        ends = await asyncio.gather(
            punch.open_together(here, (HERE, there), 5), punch.open_together(there, (HERE, here), 5)
        )
        for (reader, _), (_, writer) in (ends, ends[::-1]):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        for _, writer in ends:
            writer.transport.abort()
        with pytest.raises(TimeoutError):
            await punch.open_together(here, (HERE, 1), 0.3)


@in_loop
async def test_a_connection_that_opened_in_vain_is_closed(monkeypatch):
    async def fails(sock):
        raise ConnectionResetError

    with shared_port(socket.AF_INET) as a, shared_port(socket.AF_INET) as b:
        here, there = a.getsockname()[1], b.getsockname()[1]
        b.listen(1)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "open_connection", fails)
            with pytest.raises(ConnectionResetError) as kept:  # and with it all that its frames hold
                await punch.open_together(here, (HERE, there), 5)
        made, _ = await asyncio.get_running_loop().sock_accept(b)
        with made:
            assert await asyncio.get_running_loop().sock_recv(made, 1) == b"", "it is still open"
        assert kept.tb is not None


def punching(fails=lambda why: None, way=pb.Route.LISTEN, candidates=()):
    link = SimpleNamespace(say_punch=lambda punch: None, neighbour_stage=0)
    route = pb.Route(way=way, candidates=candidates)
    nothing = lambda *_: None  # noqa: E731
    return Punching(link, lambda: route, list, lambda: (HERE, 1), nothing, nothing, fails)  # type: ignore[arg-type]


def test_what_a_neighbour_says_of_its_own_network_is_not_dialled():
    kinds = {"127.0.0.1": "loopback", "192.168.1.1": "lan", "198.51.100.1": "public"}
    candidates = [pb.Candidate(host=host, port=1, kind=kind) for host, kind in kinds.items()]
    assert punching(candidates=candidates)._known == ["198.51.100.1"]


@pytest.mark.parametrize("why", ["", "not_seen"])
@in_loop
async def test_a_neighbour_that_offers_and_refuses_without_end_costs_little(why, monkeypatch):
    failed, clock = [], [0.0]
    monkeypatch.setattr("protomodels_cli.worker.punching.time.monotonic", lambda: clock[0])
    one = punching(failed.append)

    async def accept(offer):
        await asyncio.Event().wait()

    monkeypatch.setattr(one, "_accept", accept)
    for number in range(1000):
        clock[0] = number / 10
        one._hear(pb.Punch(number=number, host=HERE, port=1, why=why))
    assert len(failed) == (100 / timeouts.PUNCH_OFFERS_EVERY if why else 0)
    assert len(one._tasks) == (0 if why else 2)
    for task in one._tasks:
        task.cancel()


@contextlib.asynccontextmanager
async def relayed_neighbours(monkeypatch):
    """Peers a and b that find no candidate of each other, and meet at a relay."""
    monkeypatch.setattr("protomodels_cli.worker.punching.FIRST", 0.0)
    secret = "s" * 32
    relay = Relay(secret, RelayLimits())
    port = await relay.open(HERE, 0)
    listeners = {name: Listener(identity(name)) for name in "ab"}
    ends = {"a": End("b", True), "b": End("a", False)}
    failed: dict[str, list[str]] = {"a": [], "b": []}
    ways = {}
    for name, other in ("ab", "ba"):
        await listeners[name].start(HERE, 0)
        role = "dial" if name == "a" else "accept"
        ticket = Ticket("run", "meeting", name, int(time.time()) + 600).signed(secret, role)
        route = pb.Route(
            way=pb.Route.DIAL if name == "a" else pb.Route.LISTEN,
            peer=other,
            ticket="t",
            candidates=[pb.Candidate(host=HERE, port=1, kind="public")],  # nobody answers there
            relays=[pb.Relay(host=HERE, port=port, ticket=ticket)],
            unlikely=True,
        )
        network = Network(partial(identity, name), listeners[name], lambda: (HERE, 1), None)
        listeners[name].expect(ends[name].link)
        ways[name] = Way(ends[name].link, route, network, lambda path, problem: None, failed[name].append)
    running = [asyncio.create_task(way.run()) for way in ways.values()]
    try:
        yield ends["a"], ends["b"], ways, failed, relay
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for way in ways.values():
            await way.close()
        for listener in listeners.values():
            await listener.stop()
        await relay.close()


@in_loop
async def test_a_relayed_link_moves_to_a_punched_connection_and_nothing_is_lost_or_sent_twice(monkeypatch):
    async with relayed_neighbours(monkeypatch) as (a, b, _, failed, relay):
        sent = 0
        paths = set()
        while not a.link.path == b.link.path == "punched":
            if a.link.mended.is_set() and len(b.got) == sent:
                a.link.send(message(microbatch=sent))
                sent += 1
            while b.link._taken < len(b.got):
                b.link.take()
            paths.add(a.link.path)
            await asyncio.sleep(0.01)
        await until(lambda: len(b.got) == sent)
        assert any(path.startswith("relay ") for path in paths), "it was relayed first"
        assert [m.microbatch for m in b.got] == list(range(sent))
        assert a.link.streams == 2
        assert a.link.resent == 0
        assert failed == {"a": [], "b": []}
        await until(lambda: not relay._meetings._pairs, "the relay carries nothing any more")


@in_loop
async def test_where_ports_change_both_ends_know_why_and_the_link_stays_relayed(monkeypatch):
    def liar(answer: bytes, ask=seen.read_seen):
        """As a router with another port for every connection would have it."""
        found = ask(answer)
        liar.asked += 1
        return found and (found[0], 1024 + liar.asked)

    liar.asked = 0
    monkeypatch.setattr(seen, "read_seen", liar)
    async with relayed_neighbours(monkeypatch) as (a, _, ways, failed, _):
        ways["a"].punching._observers = lambda: [(HERE, port) for port in relay_ports]
        relay_ports = [ways["a"].route.relays[0].port]
        second = Relay("s" * 32, RelayLimits())
        relay_ports.append(await second.open(HERE, 0))
        await until(lambda: failed["a"] and failed["b"])
        assert failed == {"a": ["port_changes_here"], "b": ["port_changes_there"]}
        assert a.link.relayed
        assert ways["a"].punching.turns.why == "port_changes_here"
        assert not ways["a"].punching.turns.is_due(time.monotonic() + 300)
        await second.close()


@in_loop
async def test_a_neighbour_that_names_somebody_elses_address_is_not_believed(monkeypatch):
    async with relayed_neighbours(monkeypatch) as (a, _, ways, failed, _):
        ways["b"].route.candidates[0].host = "198.51.100.7"
        await until(lambda: failed["a"] and failed["b"])
        assert failed == {"a": ["other_address_here"], "b": ["other_address_there"]}
        assert a.link.relayed
