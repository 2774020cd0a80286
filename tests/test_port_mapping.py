"""Ports that a router is asked for, from a small router over real sockets: NAT-PMP, UPnP, and what a bad one says."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from door_tools import HERE, in_loop
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from protomodels_cli.wire import port_mapping, upnp
from protomodels_cli.wire.port_mapping import Mapping, NatPmp, NoMapping, mapped
from protomodels_cli.wire.upnp import Upnp, location_of, place_of, service_of, tree_of

OUTSIDE = "198.51.100.9"
KIND = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device><deviceList><device><serviceList><service>
<serviceType>{KIND}</serviceType><controlURL>/ctl</controlURL></service></serviceList></device></deviceList></device>
</root>"""


@dataclass
class Home:
    """A router: which ports it maps, and how it is asked."""

    pmp: bool = True
    upnp: bool = True
    host: str = OUTSIDE
    seconds: int = 3600
    only_permanent: bool = False
    taken: set[int] = field(default_factory=set)
    description: bytes = DESCRIPTION.encode()
    location: str = ""
    ports: dict[int, int] = field(default_factory=dict)  # outside → inside
    asked: int = 0
    mapped: int = 0
    hangs_up: bool = True
    pmp_port: int = 0
    search_port: int = 0

    def map_pmp(self, question: bytes) -> bytes:
        if question[1] == 0:
            return struct.pack("!BBHI", 0, 128, 0, 7) + bytes(map(int, self.host.split(".")))
        _, _, _, inside, outside, seconds = struct.unpack("!BBHHHI", question)
        self.asked += 1
        if not seconds:
            self.ports = {o: i for o, i in self.ports.items() if i != inside}
            return struct.pack("!BBHIHHI", 0, 130, 0, 7, inside, 0, 0)
        while outside in self.taken:
            outside += 1
        self.ports = {o: i for o, i in self.ports.items() if i != inside} | {outside: inside}
        self.mapped += 1
        return struct.pack("!BBHIHHI", 0, 130, 0, 7, inside, outside, min(seconds, self.seconds))

    def soap(self, action: str, body: str) -> str:
        def of(name: str) -> str:
            found = re.search(f"<{name}>(.*?)</{name}>", body)
            return found[1] if found else ""

        self.asked += 1
        code = ""
        if action == "AddPortMapping":
            if self.only_permanent and of("NewLeaseDuration") != "0":
                code = "725"
            elif int(of("NewExternalPort")) in self.taken:
                code = "718"
            else:
                self.mapped += 1
                self.ports[int(of("NewExternalPort"))] = int(of("NewInternalPort"))
        elif action == "DeletePortMapping":
            self.ports.pop(int(of("NewExternalPort")))
        inside = f"<NewExternalIPAddress>{self.host}</NewExternalIPAddress>" if action.startswith("Get") else ""
        answer = f'<u:{action}Response xmlns:u="{KIND}">{inside}</u:{action}Response>'
        if code:
            error = f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode></UPnPError>'
            answer = f"<s:Fault><detail>{error}</detail></s:Fault>"
        return f'<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{answer}</s:Body></s:Envelope>'

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(re.search(r"Content-Length: (\d+)", head)[1])  # type: ignore[index]
        body = (await reader.readexactly(size)).decode()
        action = re.search(r"#(\w+)", head)
        answer = self.soap(action[1], body).encode() if action else self.description
        if self.hangs_up:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + answer)
            writer.close()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Home]:
        loop, home = asyncio.get_running_loop(), self
        server = await asyncio.start_server(self.http, HERE, 0)
        location = self.location or f"http://{HERE}:{server.sockets[0].getsockname()[1]}/root.xml"

        class Listens(asyncio.DatagramProtocol):
            def __init__(self, answer):
                self.answer = answer

            def connection_made(self, transport):
                self.transport = transport

            def datagram_received(self, data, addr):
                if said := self.answer(data):
                    self.transport.sendto(said, addr)

        def search(data: bytes) -> bytes:
            found = home.upnp and data.startswith(b"M-SEARCH")
            return f"HTTP/1.1 200 OK\r\nST: x\r\nLOCATION: {location}\r\n\r\n".encode() if found else b""

        pmp = lambda data: home.map_pmp(data) if home.pmp else b""  # noqa: E731
        opened = [
            await loop.create_datagram_endpoint(lambda a=a: Listens(a), local_addr=(HERE, 0)) for a in (pmp, search)
        ]
        self.pmp_port, self.search_port = (t.get_extra_info("sockname")[1] for t, _ in opened)
        try:
            yield self
        finally:
            server.close()
            for transport, _ in opened:
                transport.close()

    def routers(self) -> list[port_mapping.Router]:
        return [NatPmp(HERE, self.pmp_port), Upnp(HERE, HERE, (HERE, self.search_port))]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(port_mapping, "PMP_TRIES", (1.0, 1.0))
    monkeypatch.setattr(upnp, "SEARCH_SECONDS", 3.0)


@pytest.mark.parametrize("by", ["NAT-PMP", "UPnP"])
@in_loop
async def test_a_port_is_mapped_renewed_and_removed(by, monkeypatch):
    monkeypatch.setattr(port_mapping, "LEAST_LIFETIME", 0.2)
    monkeypatch.setattr(port_mapping, "LIFETIME", 0 if by == "UPnP" else 3600)
    async with Home(pmp=by == "NAT-PMP", seconds=0.2 if by == "UPnP" else 1).open() as home:
        async with mapped(home.routers(), 7421, pytest.fail) as kept:
            mapping = kept.mapping
            assert (mapping.host, mapping.port, mapping.by) == (OUTSIDE, 7421, by)
            assert home.ports == {7421: 7421}
            if by == "NAT-PMP":
                asked = home.asked
                await until(lambda: home.asked > asked, "it was not renewed")
        assert home.ports == {}, "it was not removed"


@in_loop
async def test_upnp_mappings_are_renewed_too(monkeypatch):
    monkeypatch.setattr(port_mapping, "LEAST_LIFETIME", 0.2)
    monkeypatch.setattr(port_mapping, "LIFETIME", 0.2)
    async with Home(pmp=False).open() as home, mapped(home.routers(), 7421, pytest.fail):
        asked = home.asked
        await until(lambda: home.asked > asked + 1, "it was not renewed")


@pytest.mark.parametrize("by", ["NAT-PMP", "UPnP"])
@in_loop
async def test_what_a_renewal_gives_is_what_is_told_from_then_on_and_removed(by, monkeypatch):
    """The router has begun anew, has another address, and has given the port to somebody else."""
    monkeypatch.setattr(port_mapping, "LEAST_LIFETIME", 0.2)
    monkeypatch.setattr(port_mapping, "LIFETIME", 1)
    async with Home(pmp=by == "NAT-PMP").open() as home:
        async with mapped(home.routers(), 7421, pytest.fail) as kept:
            home.host, home.taken, home.ports = "198.51.100.10", {7421}, {7421: 9}
            await until(lambda: kept.mapping.port != 7421, "what the router gave was not kept")
            assert (kept.mapping.host, kept.mapping.port) == ("198.51.100.10", 7422)
            assert home.ports == {7421: 9, 7422: 7421}
        assert home.ports == {7421: 9}, "only the own one is removed"


@in_loop
async def test_a_mapping_that_leads_nowhere_is_removed_again():
    removed = []

    class Odd(NatPmp):
        async def add(self, port, outside, seconds):
            return Mapping(OUTSIDE, 0, 60, "NAT-PMP")

        async def remove(self, mapping, port):
            removed.append(port)

    with pytest.raises(NoMapping):
        await port_mapping.find([Odd(HERE)], 7421)
    assert removed == [7421]


@pytest.mark.parametrize("by", ["NAT-PMP", "UPnP"])
@in_loop
async def test_where_the_port_is_anothers_the_router_gives_the_next(by):
    async with Home(pmp=by == "NAT-PMP", taken={7421}).open() as home:
        async with mapped(home.routers(), 7421, pytest.fail) as kept:
            assert kept.mapping.port == 7422
            assert home.ports == {7422: 7421}
        assert home.ports == {}


@in_loop
async def test_a_router_that_knows_only_lasting_mappings_has_it_taken_away_at_the_end():
    async with Home(pmp=False, only_permanent=True).open() as home:
        async with mapped(home.routers(), 7421, pytest.fail) as kept:
            assert kept.mapping.seconds == 0
        assert home.ports == {}


@in_loop
async def test_a_router_that_does_not_hang_up_costs_no_time(monkeypatch):
    monkeypatch.setattr(upnp, "CALL_SECONDS", 60.0)
    async with Home(pmp=False, hangs_up=False).open() as home:
        async with asyncio.timeout(30), mapped(home.routers(), 7421, pytest.fail):
            pass
        assert (home.mapped, home.ports) == (1, {})


BOMB = b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><root>&a;</root>"


@pytest.mark.parametrize(
    "bad",
    [
        {"upnp": False},
        {"host": "192.168.0.2"},
        {"host": "100.64.1.1"},
        {"location": "http://192.0.2.7/root.xml"},
        {"location": "https://127.0.0.1/root.xml"},
        {"location": "file:///etc/passwd"},
        {"description": BOMB},
        {"description": BOMB.decode().encode("utf-16")},
        {"description": b"x" * (1 << 20)},
        {"description": b"<root/>"},
        {"description": DESCRIPTION.replace("/ctl", "http://192.0.2.7/ctl").encode()},
        {"description": DESCRIPTION.replace("/ctl", "http://[x").encode()},
    ],
    ids=str,
)
@in_loop
async def test_a_router_without_or_with_nonsense_maps_nothing(bad):
    async with Home(pmp="host" in bad, **bad).open() as home:
        with pytest.raises(NoMapping):
            async with mapped(home.routers(), 7421, pytest.fail):
                pass
        assert not home.ports
        assert not home.mapped


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.1.2/x",
        "https://192.168.1.1/x",
        "http://192.168.1.1@192.168.1.2/x",
        "http:///x",
        "ftp://192.168.1.1/",
        "http://192.168.1.1:99999/x",
        "http://192.168.1.1/a b",
        "http://192.168.1.1/\r\nHost: x",
        "http://[",
        "",
    ],
)
def test_nobody_but_the_gateway_is_called(url):
    assert place_of("http://192.168.1.1:5000/x?y=1", "192.168.1.1") == (5000, "/x?y=1")
    with pytest.raises(NoMapping):
        place_of(url, "192.168.1.1")


@in_loop
async def test_no_gateway_is_said():
    with pytest.raises(NoMapping):
        async with mapped([], 7421, pytest.fail):
            pass


@given(st.binary(max_size=80))
def test_what_is_no_answer_is_refused_as_such(content):
    for read in (port_mapping.read_address, lambda c: port_mapping.read_port(c, 7421), tree_of, service_of):
        with contextlib.suppress(NoMapping):
            read(content)
    location_of(content)
    with contextlib.suppress(NoMapping):
        place_of(content.decode("latin-1"), HERE)


@given(st.integers(0, 65535), st.integers(0, 65535), st.integers(1, 2**32 - 1))
def test_nat_pmp_is_read_as_the_rfc_has_it(port, outside, seconds):
    """RFC 6886, section 3.3."""
    answer = bytes([0, 130, 0, 0]) + bytes(4) + struct.pack("!HHI", port, outside, seconds)
    assert port_mapping.read_port(answer, port) == (outside, seconds)
    assert port_mapping.ask_port(port, outside, seconds)[:4] == bytes([0, 2, 0, 0])
    for code in (1, 2, 3, 4, 5, 99):
        with pytest.raises(NoMapping):
            port_mapping.read_port(answer[:2] + struct.pack("!H", code) + answer[4:], port)


def test_a_mapping_to_a_port_that_there_is_not_is_refused():
    with pytest.raises(NoMapping):
        port_mapping.checked(Mapping(OUTSIDE, 0, 60, "NAT-PMP"))
