"""Relays that stand by themselves: tickets, limits, books, and what one that lies or dies costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import ssl
import time
from dataclasses import replace

import pytest
from door_tools import HERE, MIB, a_server, answer_to, both_ways, dial, echo, in_loop, tls_context
from hypothesis import given
from hypothesis import strategies as st
from starting import begin_logged
from waiting import PATIENCE, until, wait_for

from protomodels_cli.bench.loopback import small
from protomodels_cli.launch.local import local_run
from protomodels_cli.observe.tail import Tail
from protomodels_cli.wire import tls
from protomodels_cli.wire.join_link import LinkError
from protomodels_cli.wire.relay import RelayedAcceptor, RelayedDialler, RelayError, dial_relay
from protomodels_cli.wire.relaying import BURST_SECONDS, Allowance, Relay, RelayLimits
from protomodels_cli.wire.tickets import RelayLink, Ticket, kept_secret, read_ticket, relay_links

pytestmark = pytest.mark.waiting

SECRET = "s" * 32
NOW = int(time.time())
TICKET = Ticket("run1", "meeting1", "p1", NOW + 24 * 3600)  # the suite takes a while
QUICK = RelayLimits(first_seconds=1.0, wait_seconds=1.0)
words = st.from_regex(r"[0-9a-z]{1,32}", fullmatch=True)
roles = st.sampled_from(["dial", "accept"])


@given(words, words, words, st.integers(0, 2**34), roles, st.integers(0, 2**34), st.data())
def test_a_ticket_is_good_as_it_was_signed_and_not_otherwise(run, meeting, peer, expires, role, now, data):
    ticket = Ticket(run, meeting, peer, expires)
    text = ticket.signed(SECRET, role)
    assert read_ticket(text, SECRET, role, now) == (ticket if now < expires else None)
    assert read_ticket(text, SECRET, "accept" if role == "dial" else "dial", 0) is None
    assert read_ticket(text, "t" * 32, role, 0) is None
    i = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("0a-z_"))
    if text[i] != other:
        assert read_ticket(text[:i] + other + text[i + 1 :], SECRET, role, 0) is None


@given(st.text())
def test_what_is_no_ticket_is_none(text):
    assert read_ticket(text, SECRET, "dial", 0.0) is None


def test_a_link_is_read_as_it_was_printed_also_from_a_file(tmp_path):
    links = [RelayLink("r.example", 7430, SECRET), RelayLink("2001:db8::7", 1, SECRET)]
    assert [RelayLink.parse(str(link)) for link in links] == links
    (tmp_path / "links").write_text("".join(f"{link}\n" for link in links))
    assert relay_links([str(tmp_path / "links"), str(links[0])]) == links
    for bad in ("", "pm://r.example:1/x", "pmr://r.example:7430", "pmr://r.example/" + SECRET, "pmr://:1/" + SECRET):
        with pytest.raises(LinkError):
            RelayLink.parse(bad)
    first = kept_secret(tmp_path)
    assert kept_secret(tmp_path) == first
    assert (tmp_path / "secret").stat().st_mode & 0o77 == 0


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 3)), min_size=1, max_size=50))
def test_whoever_rests_as_told_never_sends_above_the_rate_and_its_burst(sends):
    allowance, now, sent = Allowance(8e5), 1000.0, 0  # 100 kB a second
    for size, pause in sends:
        now += pause
        sent += size
        now += allowance.take(size, now)
        assert sent <= 1e5 * (now - 1000.0 + BURST_SECONDS) + 1
    assert Allowance(0).take(10**9, 0.0) == 0


@contextlib.asynccontextmanager
async def a_relay(limits=QUICK):
    relay = Relay(SECRET, limits)
    port = await relay.open(HERE, 0)
    try:
        yield relay, port
    finally:
        await relay.close()


def signed(role: str, **fields: object) -> str:
    return replace(TICKET, **fields).signed(SECRET, role)


@in_loop
async def test_only_tickets_of_its_own_secret_meet_and_bytes_are_counted_by_run_and_peer(tmp_path):
    async with a_relay() as (relay, port):
        for bad in (signed("dial", expires=NOW - 1), TICKET.signed("t" * 32, "dial"), signed("accept"), "a-ticket_1"):
            with pytest.raises(RelayError) as error:
                await dial_relay(HERE, port, bad, "dial")
            assert error.value.kind == "unknown_ticket"
        assert await answer_to(port, b"GET / HTTP/1.1\r\n") == b""
        assert await answer_to(port, b"") == b""
        ends = await asyncio.gather(
            dial_relay(HERE, port, signed("dial"), "dial"),
            dial_relay(HERE, port, signed("accept", peer="p2"), "accept"),
        )
        with pytest.raises(RelayError):  # of another run, with the same meeting: it waits alone
            await dial_relay(HERE, port, signed("dial", run="run2"), "dial")
        ends[0][1].write(b"12345")
        ends[1][1].write(b"123")
        assert (await ends[1][0].read(9), await ends[0][0].read(9)) == (b"12345", b"123")
        relay.write_books(tmp_path)
        books = json.loads((tmp_path / "relayed.json").read_text())
        assert books["bytes_sent"]["run1"] == {"p1": 5, "p2": 3}
        assert books["refused"] == {"unknown_ticket": 4, "unknown_request": 1, "no_request": 1}
        for _, writer in ends:
            writer.transport.abort()
        await until(lambda: relay.connections == 0)
        assert not relay._by
        assert not relay._meetings._moved


@in_loop
async def test_connections_of_an_address_and_of_a_peer_are_limited():
    async with a_relay(replace(QUICK, wait_seconds=5, connections_per_peer=1)) as (relay, port):
        line = f"PMTRAIN 1 RELAY {signed('accept')} accept\n".encode()
        await dial(port, line)
        await until(lambda: relay._meetings._waiting)
        assert await answer_to(port, line) == b""
        assert relay.books.refused == {"too_many_of_one_run": 1}
    async with a_relay(replace(QUICK, first_seconds=5, connections_per_address=2)) as (relay, port):
        kept = [await dial(port) for _ in range(2)]
        await until(lambda: relay.connections == 2)
        assert await answer_to(port, b"") == b""
        assert relay.books.refused == {"too_many_connections": 1}
        assert len(kept) == 2


@in_loop
async def test_a_peer_is_held_to_its_rate_and_the_other_is_not():
    limits = replace(QUICK, wait_seconds=5, bits_per_peer=8 * MIB)  # 1 MiB a second
    async with a_relay(limits) as (_, port):
        (a, b) = await asyncio.gather(
            dial_relay(HERE, port, signed("dial"), "dial"),
            dial_relay(HERE, port, signed("accept", peer="p2"), "accept"),
        )
        began = time.monotonic()
        a[1].write(bytes(2 * MIB))
        await b[0].readexactly(2 * MIB)
        assert time.monotonic() - began > 1.0, "two seconds' worth, and half a second at once"
        a[1].write(bytes(2 * MIB))
        arriving = asyncio.create_task(b[0].readexactly(2 * MIB))
        b[1].write(b"x")
        assert await a[0].readexactly(1) == b"x"
        assert not arriving.done(), "the other does not wait behind them"
        await arriving
        for _, writer in (a, b):
            writer.transport.abort()


@in_loop
async def test_a_relay_that_changes_a_bit_is_noticed_by_tls_and_the_next_connection_works(authority, monkeypatch):
    server = tls_context(authority.issue_with_key(tls.peer_name("serves")), server=True)
    client = tls_context(authority.issue_with_key(tls.peer_name("dials")), server=False)
    from protomodels_cli.wire.splice import Pump

    honest, flips, seen = Pump.data_received, [], []

    def flip(self, data: bytes) -> None:
        seen.append(data)
        if len(data) > 10_000 and not flips:
            flips.append(1)
            data = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
        honest(self, data)

    async with a_server(echo, server) as target, a_relay(replace(QUICK, wait_seconds=5)) as (_, port):
        acceptor = RelayedAcceptor((HERE, port), signed("accept", peer="p2"), (HERE, target))
        dialler = RelayedDialler((HERE, port), signed("dial"))
        acceptor.start()
        local = await dialler.open()
        monkeypatch.setattr(Pump, "data_received", flip)
        data = secrets.token_bytes(MIB)

        async def transfer() -> bytes:
            reader, writer = await dial(local, ssl=client, server_hostname=tls.peer_name("serves"))
            return await both_ways(reader, writer, data)

        with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
            await transfer()
        assert flips
        assert await transfer() == data
        assert not any(data[i : i + 64] in b"".join(seen) for i in range(0, MIB, 64 * 1024)), "what it sees is TLS"
        await acceptor.close()
        await dialler.close()


def test_links_go_through_a_relay_and_through_another_when_it_dies(tmp_path, monkeypatch):
    """`pmtrain relay` and `pmtrain coordinator --relay`, as real processes: nobody listens, so that all are relayed."""
    monkeypatch.setattr("protomodels_cli.launch.local.start", begin_logged)
    (tmp_path / "logs").mkdir()
    spec = small(
        steps=40,
        stages=2,
        model={"layers": 2, "width": 32, "context": 16},
        batch={"size": 4},
        data={"max_bytes": 200_000},
        tokenizer={"kind": "bytes", "vocab_size": 256},
    )
    relays = [tmp_path / name for name in ("relay-1", "relay-2")]
    processes = {}
    try:
        for own in relays:
            words = ["relay", "--host", HERE, "--port", "0", "--dir", str(own)]
            process = begin_logged(tmp_path, own.name, words)
            wait_for(lambda own=own: (own / "link").exists())
            processes[RelayLink.parse((own / "link").read_text()).address] = process
        (tmp_path / "relay.link").write_text("".join((own / "link").read_text() for own in relays))
        lead = ["--relay", str(tmp_path / "relay.link"), "--no-page"]
        with local_run(spec, tmp_path / "run", lead_options=lead, join_options=["--no-listen"]) as running:
            metrics = Tail(running.folder / "metrics.jsonl")
            seen = []

            def steps() -> list[dict]:
                seen.extend(row for row in metrics.rows() if row["event"] == "step")
                return seen

            wait_for(lambda: len(steps()) >= 5)
            used = seen[-1]["stages"]["path"][0].removeprefix("relay ")
            processes[used].kill()
            assert running.coordinator.wait(PATIENCE) == 0
            paths = [row["stages"]["path"][0] for row in steps()]
            assert (running.folder / "relays").stat().st_mode & 0o77 == 0
        [other] = set(processes) - {used}
        assert paths[-1] == f"relay {other}"
        assert [row["step"] for row in seen] == list(range(1, 41))
        assigned = [row for row in Tail(running.folder / "events.jsonl").rows() if row["kind"] == "stages_assigned"]
        assert len(assigned) == 1, "nothing was done again"
        processes[other].send_signal(signal.SIGTERM)
        processes[other].wait(PATIENCE)
        [books] = [json.loads((own / "relayed.json").read_text()) for own in relays if (own / "relayed.json").exists()]
        [sent] = books["bytes_sent"].values()
        assert len(sent) == 2
        assert min(sent.values()) > 1000
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
