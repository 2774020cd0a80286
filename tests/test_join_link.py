"""The join link: how it is written and read, and what is fetched with it before a token is sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest
from door_tools import (
    HERE,
    MIB,
    a_door,
    a_server,
    in_loop,
    link_to,
    to_the_end,
)
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, EXIT_SPEC
from protomodels_cli.wire import tls
from protomodels_cli.wire.join_link import (
    FingerprintError,
    JoinLink,
    LinkError,
    UnreachableError,
    fetch_authority,
    find_coordinator,
)

CODES = st.text("abcxyzABCXYZ0189-_", min_size=43, max_size=43)
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z0-9]+(-[a-z]+)?(\.[a-z]{2,9}){0,3}", fullmatch=True),
)
GOOD = "pm://example.org:7070/" + "t" * 22 + "#" + "f" * 43


ADDRESSES = st.lists(st.tuples(HOSTS, st.integers(1, 65535)), min_size=1, max_size=4, unique=True)


@given(ADDRESSES, CODES, CODES, st.sampled_from(["{}", " {}\n", "'{}'", '"{}"', "<{}>", "“{}”"]))
def test_a_link_survives_being_printed_and_pasted(addresses, token, fingerprint, pasted):
    link = JoinLink(*addresses[0], token[:22], fingerprint, tuple(addresses[1:]))
    assert JoinLink.parse(pasted.format(link)) == link
    assert link.addresses == tuple(addresses)
    last = link.beginning_with(addresses[-1])
    assert (last.host, last.port) == addresses[-1]
    assert sorted(last.addresses) == sorted(addresses)


def test_a_link_is_written_as_promised():
    assert str(JoinLink("example.org", 7070, "t" * 22, "f" * 43)) == GOOD
    assert str(JoinLink("2001:db8::1", 1, "t" * 22, "f" * 43)).startswith("pm://[2001:db8::1]:1/")
    assert "t" * 22 not in repr(JoinLink.parse(GOOD))
    several = JoinLink("example.org", 7070, "t" * 22, "f" * 43, (("2001:db8::1", 1), ("b.example", 2)))
    assert str(several) == GOOD.replace(":7070", ":7070,[2001:db8::1]:1,b.example:2")


@pytest.mark.parametrize(
    ("text", "part", "names"),
    [
        ("", "empty", None),
        ("''", "empty", None),
        (GOOD.replace("pm://", ""), "scheme", "'examp'"),
        (GOOD.replace("pm:", "https:"), "scheme", "'https'"),
        (GOOD.replace("example.org", ""), "host", None),
        (GOOD.replace("example.org", "exa$mple"), "host", r"'exa\$mple'"),
        (GOOD.replace("example.org", "-o"), "host", "'-o'"),
        (GOOD.replace("example.org", "2001:db8::1"), "host", "2001:db8::1"),
        (GOOD.replace("example.org", "[2001:db8::1"), "host", r"\[2001:db8::1"),
        (GOOD.replace("example.org", "[2001:db8:::1]"), "host", "'2001:db8:::1'"),
        (GOOD.replace("example.org", "[fe80::1%eth0]"), "host", "%eth0"),
        (GOOD.replace(":7070", ""), "port", "'example.org'"),
        (GOOD.replace(":7070", ":7070,"), "host", None),
        (GOOD.replace(":7070", ":7070,b.example"), "port", "'b.example'"),
        (GOOD.replace(":7070", ":7070,-o:1"), "host", "'-o'"),
        (GOOD.replace(":7070", ":7070,[2001:db8:::1]:1"), "host", "'2001:db8:::1'"),
        (GOOD.replace(":7070", ":7070,b.example:0"), "port", " 0,.* 65535"),
        (GOOD.replace(":7070", ":7070,example.org:7070"), "addresses", None),
        (GOOD.replace(":7070", ":7070" + "".join(f",b:{i}" for i in range(1, 9))), "addresses", " 9 .* 8"),
        (GOOD.replace("7070", "http"), "port", "'http'"),
        (GOOD.replace("7070", "70700"), "port", "70700.* 65535"),
        (GOOD.replace("7070", "0"), "port", " 0,.* 65535"),
        (GOOD.replace("7070", "٧٠"), "port", "'٧٠'"),
        ("pm://example.org:7070", "token", None),
        (GOOD.replace("t" * 22, ""), "token", None),
        (GOOD.replace("t" * 22, "t" * 12), "token", " 12 .* 22"),
        (GOOD.replace("tt", "t/t", 1), "token", None),
        (GOOD.partition("#")[0], "fingerprint", "#"),
        (GOOD.partition("#")[0] + "#", "fingerprint", "#"),
        (GOOD[:-1], "fingerprint", " 42 .* 43"),
        (GOOD + ".", "fingerprint", None),
        (GOOD[:30] + "\n" + GOOD[30:], "space", None),
        (GOOD[:30] + " " + GOOD[30:], "space", None),
        (GOOD + "f" * 600, "length", " 688 .* 512"),
    ],
)
def test_broken_links_are_told_which_part_is_broken(text, part, names):
    with pytest.raises(LinkError, match=names) as error:
        JoinLink.parse(text)
    assert (error.value.kind, error.value.exit_code) == (f"link_{part}", EXIT_SPEC)
    assert "pm://HOST:PORT/TOKEN#FINGERPRINT" in str(error.value)
    assert "t" * 22 not in str(error.value)  # errors end up in chats; a token must not


@given(st.text(max_size=80))
def test_no_text_does_worse_than_a_link_error(text):
    for attempt in (text, "pm://" + text, GOOD[:20] + text + GOOD[20:], GOOD.replace("example.org", f"[{text}]")):
        with contextlib.suppress(LinkError):
            JoinLink.parse(attempt)


@in_loop
async def test_the_door_hands_out_the_authority(authority):
    async with a_door(authority) as (door, port):
        assert await fetch_authority(link_to(port, authority), 5) == authority.certificate_pem
        assert not door.refused


@in_loop
async def test_the_coordinator_is_looked_for_at_every_address_of_the_link(authority, unused_port):
    async def another_run(reader, writer):
        await reader.readuntil(b"\n")
        writer.write(tls.new_authority().certificate_pem)
        writer.write_eof()
        await to_the_end(reader)

    async with a_door(authority) as (_, port), a_server(another_run) as other:
        elsewhere = (HERE, other), (HERE, port)
        link = replace(link_to(unused_port, authority), others=elsewhere)
        found, pem = await find_coordinator(link, 5)
        assert (found, pem) == (link.beginning_with((HERE, port)), authority.certificate_pem)
        with pytest.raises(UnreachableError):  # which may change, where a fingerprint does not
            await find_coordinator(replace(link, others=elsewhere[:1]), 5)
        with pytest.raises(FingerprintError):
            await find_coordinator(replace(link, port=other, others=()), 5)


@in_loop
async def test_another_fingerprint_ends_it_before_the_token_is_sent(authority):
    received = []

    async def other_door(reader, writer):
        received.append(await reader.readuntil(b"\n"))
        writer.write(tls.new_authority().certificate_pem)
        writer.write_eof()
        received.append(await to_the_end(reader))

    async with a_server(other_door) as port:
        link = link_to(port, authority)
        with pytest.raises(FingerprintError, match=link.fingerprint) as error:
            await fetch_authority(link, 5)
        await until(lambda: len(received) == 2)
    assert (error.value.kind, error.value.exit_code) == ("fingerprint_mismatch", EXIT_REFUSED)
    assert received == [b"PMTRAIN 1 CA\n", b""]
    assert link.token not in str(error.value)


@pytest.mark.parametrize("order", [1, -1])
@in_loop
async def test_a_second_certificate_does_not_slip_in_beside_the_right_one(authority, order):
    """gRPC would trust both: whoever sits in between could add its own."""
    answer = b"".join([authority.certificate_pem, tls.new_authority().certificate_pem][::order])

    async def in_between(reader, writer):
        await reader.readline()
        writer.write(answer)

    async with a_server(in_between) as port:
        with pytest.raises(UnreachableError) as error:
            await fetch_authority(link_to(port, authority), 5)
        assert error.value.kind == "not_a_coordinator"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not_a_coordinator"),
        (b"", "no_answer"),
        (b"x" * MIB, "not_a_coordinator"),
        (None, "timeout"),
    ],
)
@in_loop
async def test_something_else_at_the_address(authority, answer, kind):
    async def something_else(reader, writer):
        if answer is None:
            await asyncio.sleep(60)
        if answer != b"":  # with nothing to say it hangs up on what it has not even read
            await reader.readline()
        writer.write(answer)
        while len(answer) == MIB:  # never stops
            writer.write(answer)
            await writer.drain()

    async with a_server(something_else) as port:
        with pytest.raises(UnreachableError, match=f":{port}") as error:
            await fetch_authority(link_to(port, authority), 0.2 if answer is None else 5)
    assert (error.value.kind, error.value.exit_code) == (kind, EXIT_OUTSIDE)


@in_loop
async def test_nobody_at_the_address(authority):
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{port}") as error:
        await fetch_authority(link_to(port, authority), 5)
    assert error.value.kind == "connection_refused"
    with pytest.raises(UnreachableError, match=r"no-such-host\.invalid") as error:
        await fetch_authority(link_to(port, authority, "no-such-host.invalid"), 5)
    assert error.value.kind == "unknown_host"
