"""Which addresses of a peer a neighbour is told, and which relays: properties over all kinds of peers."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from machine_bench import peer

from protomodels_cli.coordinator.candidates import candidates_for, dials, may_be_direct, nearest, site_of
from protomodels_cli.coordinator.messages import port_at
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.wire.addresses import is_address, is_private, machine_id, own_addresses
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

PUBLIC = ("198.51.100.1", "198.51.100.2", "2001:db8::7")
PRIVATE = ("192.168.1.10", "192.168.1.11", "10.0.0.7", "100.64.0.9", "fd00::7", "127.0.0.1")
HOME = "203.0.113.1"

peers = st.builds(
    lambda i, address, port, reached, own, machine, outside, mapped: replace(
        peer(i),
        address=address,
        port=port,
        reached=tuple(reached),
        addresses=tuple(own),
        machine=machine,
        outside_port=outside,
        outside_host=mapped,
    ),
    st.integers(0, 3),
    st.sampled_from([*PUBLIC, *PRIVATE, HOME, ""]),
    st.sampled_from([0, 1, 42707]),
    st.lists(st.sampled_from(PUBLIC), max_size=2, unique=True),
    st.lists(st.sampled_from([*PUBLIC, *PRIVATE]), max_size=4),
    st.sampled_from(["", "m1", "m2"]),
    st.sampled_from([0, 7421]),
    st.sampled_from(["", *PUBLIC, HOME]),
)
homes = st.sampled_from([HOME, "192.168.1.10", "127.0.0.1", "train.example.org"])


@given(peers, peers, homes)
def test_what_a_neighbour_is_told(dialler: Peer, listener: Peer, home: str):
    found = candidates_for(dialler, listener, home)
    assert bool(found) <= bool(listener.port)
    for c in found:
        is_mapped = c.kind == "public" and c.host == listener.outside_host and listener.outside_port
        assert c.port == (listener.outside_port if is_mapped else listener.port)
        if c.kind == "loopback":
            assert dialler.machine == listener.machine != ""
        elif c.kind == "lan":
            assert is_private(c.host)
            assert not ipaddress.ip_address(c.host).is_loopback
            assert site_of(dialler, home) == site_of(listener, home), "a private address, to a stranger"
        else:
            assert not is_private(c.host)
            # Nobody makes strangers dial where the coordinator has neither seen nor reached it.
            assert c.host in {*listener.reached, listener.address} or (c.host == home and is_private(listener.address))
            assert c.likely == (c.host in listener.reached)
    assert len({(c.host, c.port) for c in found}) == len(found)


@given(peers, peers, homes)
def test_one_of_two_dials_and_it_is_one_who_may_succeed(a: Peer, b: Peer, home: str):
    dialler, listener = (a, b) if dials(a, b, home) else (b, a)
    assert may_be_direct(a, b, home) == any(c.likely for c in candidates_for(dialler, listener, home))


def at(address: str, *own: str, i: int = 0, machine: str = "", reached: tuple[str, ...] = ()) -> Peer:
    return replace(peer(i), address=address, addresses=own, machine=machine, reached=reached)


def test_two_in_one_lan_are_told_their_addresses_there_and_others_are_not():
    a, b = at("198.51.100.1", "192.168.1.10"), at("198.51.100.1", "192.168.1.11", i=1)
    assert [(c.host, c.kind) for c in candidates_for(a, b, HOME)] == [
        ("192.168.1.11", "lan"),
        ("198.51.100.1", "public"),
    ]
    stranger = at("198.51.100.2", "192.168.1.12", i=2)
    assert [(c.host, c.likely) for c in candidates_for(stranger, b, HOME)] == [("198.51.100.1", False)]


def test_a_peer_beside_the_coordinator_is_not_dialled_at_its_private_address_from_elsewhere():
    beside, far = at("192.168.1.10", "192.168.1.10", reached=("192.168.1.10",)), at("198.51.100.1", i=1)
    assert [(c.host, c.likely) for c in candidates_for(far, beside, HOME)] == [(HOME, False)]
    near = at("192.168.1.11", i=2)
    assert candidates_for(near, beside, HOME)[0].host == "192.168.1.10"
    assert dials(far, replace(near, port=0), HOME), "neither can be reached: the earlier one, at a relay"


def test_a_mapped_port_is_its_routers_alone():
    """An IPv6 address of the machine itself is dialled at the port that it listens at."""
    listener = replace(at("198.51.100.1", i=1), port=42707, outside_port=7421, outside_host="198.51.100.1")
    listener = replace(listener, reached=("198.51.100.1", "2001:db8::7"))
    found = {c.host: c.port for c in candidates_for(at("198.51.100.2"), listener, HOME)}
    assert found == {"198.51.100.1": 7421, "2001:db8::7": 42707}
    said = pb.ReachabilityRequest(port=42707, outside_port=7421, outside_host="198.51.100.1")
    assert {host: port_at(host, said) for host in found} == found


def test_a_household_of_ipv6_is_one_site():
    a, b = at("2001:db8::1", "fd00::1"), at("2001:db8::2", "fd00::2", i=1)
    assert [c.host for c in candidates_for(a, b, HOME)] == ["fd00::2", "2001:db8::2"]


def test_the_nearest_relay_is_that_with_the_shortest_way_from_one_to_the_other():
    a = replace(peer(0), relay_trips=(("x", 0.010), ("y", 0.030), ("z", 0.001)))
    b = replace(peer(1), relay_trips=(("x", 0.090), ("y", 0.030)))
    assert nearest(a, b, [("w", "w"), ("x", "x"), ("y", "y"), ("z", "z")]) == ["y", "x", "w", "z"]


def test_a_machine_knows_its_addresses_and_tells_of_itself_nothing_but_whether_it_is_the_same():
    assert all(is_address(host) and not ipaddress.ip_address(host).is_loopback for host in own_addresses())
    assert machine_id("a") == machine_id("a") != machine_id("b")
    for host in ("fe80::1", "0.0.0.0", "224.0.0.1", "example.org", "", "1.2.3.4%eth0"):
        assert not is_address(host)
