"""The join link: how it is written and read, and what is fetched with it before a token is sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket

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
)

CODES = st.text("abcxyzABCXYZ0189-_", min_size=43, max_size=43)
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z0-9]+(-[a-z]+)?(\.[a-z]{2,9}){0,3}", fullmatch=True),
)
GOOD = "pm://example.org:7070/" + "t" * 22 + "#" + "f" * 43


@given(HOSTS, st.integers(1, 65535), CODES, CODES, st.sampled_from(["{}", " {}\n", "'{}'", '"{}"', "<{}>", "“{}”"]))
def test_a_link_survives_being_printed_and_pasted(host, port, token, fingerprint, pasted):
    link = JoinLink(host, port, token[:22], fingerprint)
    assert JoinLink.parse(pasted.format(link)) == link


def test_a_link_is_written_as_promised():
    assert str(JoinLink("example.org", 7070, "t" * 22, "f" * 43)) == GOOD
    assert str(JoinLink("2001:db8::1", 1, "t" * 22, "f" * 43)).startswith("pm://[2001:db8::1]:1/")
    assert "t" * 22 not in repr(JoinLink.parse(GOOD))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("''", "it is empty"),
        (GOOD.replace("pm://", ""), "begins with 'examp'"),
        (GOOD.replace("pm:", "https:"), "not with pm://"),
        (GOOD.replace("example.org", ""), "host is missing"),
        (GOOD.replace("example.org", "exa$mple"), r"host 'exa\$mple'"),
        (GOOD.replace("example.org", "-o"), "host '-o'"),
        (GOOD.replace("example.org", "2001:db8::1"), "IPv6 address in brackets"),
        (GOOD.replace("example.org", "[2001:db8::1"), "does not close"),
        (GOOD.replace("example.org", "[2001:db8:::1]"), "not an IPv6 address"),
        (GOOD.replace("example.org", "[fe80::1%eth0]"), "network card"),
        (GOOD.replace(":7070", ""), "port is missing"),
        (GOOD.replace("7070", "http"), "port is 'http'"),
        (GOOD.replace("7070", "70700"), "port is 70700"),
        (GOOD.replace("7070", "0"), "port is 0"),
        (GOOD.replace("7070", "٧٠"), "port is"),
        ("pm://example.org:7070", "token is missing"),
        (GOOD.replace("t" * 22, ""), "token is missing"),
        (GOOD.replace("t" * 22, "t" * 12), "token has 12 characters instead of 22"),
        (GOOD.replace("tt", "t/t", 1), "token has a character"),
        (GOOD.partition("#")[0], "shell may take # for the start of a comment"),
        (GOOD.partition("#")[0] + "#", "fingerprint is missing"),
        (GOOD[:-1], "fingerprint has 42 characters instead of 43"),
        (GOOD + ".", "fingerprint has a character"),
        (GOOD[:30] + "\n" + GOOD[30:], "on one line"),
        (GOOD[:30] + " " + GOOD[30:], "space or a line break"),
        (GOOD + "f" * 600, "far too many"),
    ],
)
def test_broken_links_are_told_which_part_is_broken(text, says):
    with pytest.raises(LinkError, match=says) as error:
        JoinLink.parse(text)
    assert error.value.exit_code == EXIT_SPEC
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
async def test_another_fingerprint_ends_it_before_the_token_is_sent(authority):
    received = []

    async def other_door(reader, writer):
        received.append(await reader.readuntil(b"\n"))
        writer.write(tls.new_authority().certificate_pem)
        writer.write_eof()
        received.append(await to_the_end(reader))

    async with a_server(other_door) as port:
        link = link_to(port, authority)
        with pytest.raises(FingerprintError, match="not the coordinator this link was made by") as error:
            await fetch_authority(link, 5)
        await until(lambda: len(received) == 2)
    assert error.value.exit_code == EXIT_REFUSED
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
        with pytest.raises(UnreachableError, match="no pmtrain coordinator"):
            await fetch_authority(link_to(port, authority), 5)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answers, but is no pmtrain coordinator"),
        (b"", "hung up without a word"),
        (b"x" * MIB, "answers, but is no pmtrain coordinator"),
        (None, r"no answer from 127.0.0.1:\d+ within 0.2 s"),
    ],
)
@in_loop
async def test_something_else_at_the_address(authority, answer, says):
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
        with pytest.raises(UnreachableError, match=says) as error:
            await fetch_authority(link_to(port, authority), 0.2 if answer is None else 5)
    assert error.value.exit_code == EXIT_OUTSIDE
    assert f":{port}" in str(error.value)


@in_loop
async def test_nobody_at_the_address(authority):
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"nothing listens at 127.0.0.1:{port}"):
        await fetch_authority(link_to(port, authority), 5)
    with pytest.raises(UnreachableError, match=r"no host 'no-such-host\.invalid'"):
        await fetch_authority(link_to(port, authority, "no-such-host.invalid"), 5)
