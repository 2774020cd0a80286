"""`join --upload --download`: a cap on all of a peer's traffic, against clocks, sockets and the kernel's own count."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import make_spec
from door_tools import HERE, in_loop
from machine_bench import Bench, to_step
from starting import begin
from test_hosts import needs_root
from test_links import End, identity, message
from test_pipeline import reference_of
from test_punching import relayed_neighbours
from test_run import coordinator, ends
from waiting import until, wait_for

from protomodels_cli import timeouts
from protomodels_cli.coordinator import readiness
from protomodels_cli.cost.line import HEADERS, SEGMENT, wire_bytes
from protomodels_cli.cost.saving import part_seconds
from protomodels_cli.errors import EXIT_SPEC, OptionError
from protomodels_cli.launch.hosts import Hosts
from protomodels_cli.launch.local import local_run
from protomodels_cli.spec.link import parse_link
from protomodels_cli.wire import frames
from protomodels_cli.wire.cap import AHEAD, LEAST, Cap, parse_cap
from protomodels_cli.worker.links import dial
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.paths import Network

MBIT = 1e6


@pytest.mark.parametrize(("text", "bits"), [("10mbit", 10e6), ("1.5 Mbit", 1.5e6), ("1gbit", 1e9), (None, None)])
def test_a_cap_in_words(text, bits):
    assert parse_cap("upload", text) == bits


@pytest.mark.parametrize("text", ["", "10", "10mb", "-1mbit", "0mbit", "999kbit", "64kbit"])
def test_a_cap_that_is_none_or_too_small_is_refused_by_its_name(text):
    with pytest.raises(OptionError) as refused:
        parse_cap("download", text)
    assert (refused.value.kind, refused.value.exit_code) == ("download", EXIT_SPEC)


def test_under_the_least_cap_a_link_says_a_word_in_time_while_the_other_sends_too():
    assert 2 * 8 * wire_bytes(frames.PIECE) / LEAST < timeouts.LINK_SILENT


async def _moved(cap: Cap, size: int, connections: int = 1, first: bool = False, up: bool = True) -> float:
    """Seconds until so many bytes have passed, over so many connections at once."""
    loop, arrived, all_here = asyncio.get_running_loop(), 0, asyncio.Event()

    def count(got: bytes) -> None:
        nonlocal arrived
        arrived += len(got)
        if arrived >= size * connections:
            all_here.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if up:
            while got := await reader.read(1 << 16):
                count(got)
        else:
            writer.write(bytes(size))
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HERE, 0)
    target = server.sockets[0].getsockname()[:2]
    began = loop.time()
    streams = [await asyncio.open_connection(*cap.way_to(target, first)) for _ in range(connections)]
    reading = []
    for reader, writer in streams:
        if up:
            writer.write(bytes(size))
        else:

            async def read(reader: asyncio.StreamReader = reader) -> None:
                while got := await reader.read(1 << 16):
                    count(got)

            reading.append(asyncio.create_task(read()))
    await all_here.wait()
    took = loop.time() - began
    for _, writer in streams:
        writer.transport.abort()
    await asyncio.gather(*reading, return_exceptions=True)
    server.close()
    return took


def on_the_wire(size: int) -> float:
    return size + size / SEGMENT * HEADERS


@in_loop
@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("up", [True, False])
async def test_no_more_passes_than_the_cap(connections, up):
    size = 600_000 // connections
    async with Cap(*((8 * MBIT, None) if up else (None, 8 * MBIT))) as cap:
        took = await _moved(cap, size, connections, up=up)
    assert took > size * connections / 1e6 - AHEAD - 0.02


@in_loop
async def test_what_goes_first_waits_for_nothing_and_counts():
    async with Cap(1 * MBIT, None) as cap:
        bulk = asyncio.create_task(_moved(cap, 300_000))
        await asyncio.sleep(0.1)
        await _moved(cap, 50_000, first=True)
        assert not bulk.done(), "2.4 s of bulk were before it"
        assert await bulk > 350_000 * 8 / MBIT - AHEAD - 0.1


@in_loop
async def test_bytes_that_leave_by_themselves_wait_for_their_turn_too():
    async with Cap(1 * MBIT, 2 * MBIT) as cap:
        loop = asyncio.get_running_loop()
        for wait, rate in ((cap.sent, 1 * MBIT), (cap.received, 2 * MBIT)):
            began, left = loop.time(), 50_000
            while left > 0:
                await wait(min(left, cap.piece))
                left -= cap.piece
            assert loop.time() - began > on_the_wire(50_000) * 8 / rate - AHEAD - 0.01


@in_loop
async def test_a_capped_machine_that_nobody_answers_and_a_connection_that_ends():
    """The other end of a way sees what it would see without a cap: an end."""
    async with Cap(8 * MBIT, None) as cap:
        reader, _ = await asyncio.open_connection(*cap.way_to((HERE, 1)))
        assert await reader.read() == b""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.read())[::-1])
            writer.close()

        server = await asyncio.start_server(serve, HERE, 0)
        reader, writer = await asyncio.open_connection(*cap.way_to(server.sockets[0].getsockname()[:2]))
        writer.write(b"abc")
        writer.write_eof()
        assert await reader.read() == b"cba", "what was sent is all there, and so is the answer"
        writer.close()
        server.close()


SIZE = 400_000  # 0.4 s at 8 Mbit/s


async def _crossed(a: End, b: End, size: int = SIZE) -> float:
    """Seconds that a message takes from a to b and one from b to a, one after the other."""
    began = asyncio.get_running_loop().time()
    a.link.send(message("forward", size=size))
    await until(lambda: b.got)
    there = asyncio.get_running_loop().time()
    b.link.send(message("backward", size=size))
    await until(lambda: a.got)
    return min(there - began, asyncio.get_running_loop().time() - there)


@in_loop
@pytest.mark.parametrize("dials", [True, False])
async def test_a_direct_link_is_capped_at_either_end(dials):
    async with Cap(8 * MBIT, 8 * MBIT) as cap:
        listener, a, b = Listener(identity("b")), End("b", True), End("a", False)
        await listener.start(HERE, 0, None if dials else cap)
        assert (listener.port == listener.inner_port) == dials
        listener.expect(b.link)
        at = cap.way_to((HERE, listener.port)) if dials else (HERE, listener.port)
        dialling = asyncio.create_task(dial(a.link, *at, identity("a")))
        await until(lambda: a.link.open.is_set() and b.link.open.is_set())
        assert await _crossed(a, b) > SIZE / MBIT - AHEAD - 0.05
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)
        await listener.stop()


@in_loop
@pytest.mark.parametrize("capped", ["a", "b"])
@pytest.mark.parametrize("path", ["relay", "punched"])
async def test_relayed_and_punched_links_are_capped_at_either_end(monkeypatch, capped, path):
    async with Cap(8 * MBIT, 8 * MBIT) as cap:

        def network(own, *others):
            return Network(own, *others, cap if own.args[0] == capped else None)

        monkeypatch.setattr("test_punching.Network", network)
        async with relayed_neighbours(monkeypatch) as (a, b, ways, _, _):
            if path == "relay":
                for way in ways.values():
                    monkeypatch.setattr(way.punching, "_offer", partial(asyncio.sleep, 3600))
            await until(lambda: a.link.mended.is_set() and a.link.path.startswith(path) and b.link.path == a.link.path)
            assert await _crossed(a, b) > SIZE / MBIT - AHEAD - 0.05


@pytest.mark.full
def test_a_capped_run_ends_with_the_references_weights(tmp_path):
    """At the least cap, with all that a run does: joining, steps, snapshots, parts, the goodbye."""
    spec = make_spec(name="capped", stages=2, steps=4, snapshots={"interval": 2})
    with coordinator(spec, tmp_path) as (leader, link):
        caps = "--upload", "1mbit", "--download", "1mbit"
        peers = [begin("join", link, *caps, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        for process in (*peers, leader):
            code, said = ends(process)
            assert code == 0, said
    assert reference_of(spec)[0].weights_sha256() in said


def test_a_capped_peer_gets_the_time_that_its_cap_asks_for():
    """At 1 Mbit/s it fetches an eightieth as fast as is usual: being honest and slow is no reason to lose a stage."""
    b = Bench(make_spec(stages=2, steps=12, snapshots={"interval": 0}))
    b.join(0, 1, 2)
    to_step(b, 4)
    stage, free = 1, b.state.history.holders[1]
    slow = replace(b.state, peers={**b.state.peers, free: replace(b.state.peers[free], download=1e6)})
    usual = readiness.fetch_seconds(b.state, stage, readiness.cap_of(b.state, free)) - readiness.ASKING
    assert readiness.fetch_seconds(slow, stage, readiness.cap_of(slow, free)) - readiness.ASKING == pytest.approx(
        80 * usual
    )
    spec, layers = b.state.spec, b.state.history.layers
    plain = readiness.restore_seconds(spec, layers, stage) - spec.limits.build_seconds
    capped = readiness.restore_seconds(spec, layers, stage, cap=1e6) - spec.limits.build_seconds
    assert capped == pytest.approx(16 * plain), "twice what the cap takes"
    assert part_seconds(spec, 10**9, 1e6) > 8e3 > part_seconds(spec, 10**9)


# Against the kernel's count

BUSY = """
import asyncio, sys
from protomodels_cli.wire.cap import Cap

async def main():
    async with Cap(float(sys.argv[2]), float(sys.argv[3])) as cap:
        async def send():
            _, writer = await asyncio.open_connection(*cap.way_to((sys.argv[1], 7001)))
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()
        async def fetch():
            reader, _ = await asyncio.open_connection(*cap.way_to((sys.argv[1], 7002)))
            while await reader.read(1 << 16):
                pass
        print("ready", flush=True)
        await asyncio.gather(send(), send(), fetch())

asyncio.run(main())
"""
OTHER = """
import asyncio, sys

async def take(reader, writer):
    while await reader.read(1 << 16):
        pass

async def give(reader, writer):
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()

async def main():
    await asyncio.start_server(take, sys.argv[1], 7001)
    await asyncio.start_server(give, sys.argv[1], 7002)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def counted(hosts: Hosts, host: int) -> tuple[float, float, float]:
    """When, and the bits that the kernel has sent and received there, as they would be on Ethernet."""
    said = subprocess.run(
        hosts.command(host, ["ip", "-s", "-j", "link", "show", "wan"]), capture_output=True, text=True
    )
    [found] = json.loads(said.stdout)
    tx, rx = found["stats64"]["tx"], found["stats64"]["rx"]
    return time.monotonic(), *(8 * (way["bytes"] + 14 * way["packets"]) for way in (tx, rx))


def rates(before: tuple[float, float, float], after: tuple[float, float, float]) -> list[float]:
    return [(b - a) / (after[0] - before[0]) for a, b in zip(before[1:], after[1:], strict=True)]


@needs_root
@pytest.mark.full
@pytest.mark.waiting
def test_an_upload_cap_holds_over_a_minute_next_to_a_fetch_by_the_kernels_count():
    upload, download = 5 * MBIT, 10 * MBIT
    # A line that can lose packets has no offloading: the kernel then counts every packet as it is.
    with Hosts(2, parse_link("50mbit,20ms,0ms,0.0000001")) as hosts:
        processes = []
        try:
            for host, program in ((0, OTHER), (1, BUSY)):
                words = [sys.executable, "-c", program, hosts.address(0), str(upload), str(download)]
                process = subprocess.Popen(hosts.command(host, words), stdout=subprocess.PIPE, text=True)
                processes.append(process)
                assert process.stdout.readline() == "ready\n"
            time.sleep(2)
            before = counted(hosts, 1)
            time.sleep(60)
            sent, received = rates(before, counted(hosts, 1))
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdout.close()
    print(f"sent {sent / MBIT:.3f} Mbit/s, received {received / MBIT:.3f} Mbit/s")
    assert sent == pytest.approx(upload, rel=0.05)
    assert received < 1.05 * download


def steps(run: Path) -> int:
    """That were decided."""
    rows = run / "metrics.jsonl"
    lines = rows.read_text().splitlines(keepends=True) if rows.exists() else []
    return sum(json.loads(line)["event"] == "step" for line in lines if line.endswith("\n"))


@needs_root
@pytest.mark.full
@pytest.mark.waiting
def test_a_real_run_stays_below_its_caps_by_the_kernels_count(tmp_path: Path):
    """Activations, gradients, parts of snapshots and a spare's fetch, each peer on a host of its own."""
    model = {"layers": 3, "width": 128, "hidden": 256, "context": 128}
    form, batch = {"form": "dense", "k": 1}, {"size": 16, "microbatches": 8}
    spec = make_spec(
        name="capped", stages=3, steps=10_000, model=model, subspace=form, batch=batch, snapshots={"interval": 3}
    )
    cap, caps = 2 * MBIT, ["--upload", "2mbit", "--download", "4mbit", "--no-preflight"]
    with (
        Hosts(5, parse_link("50mbit,20ms,0ms,0.0000001")) as hosts,
        local_run(spec, tmp_path / "run", join_options=caps, hosts=hosts, spares=1),
    ):
        wait_for(lambda: steps(tmp_path / "run") > 1, "no step was decided")
        decided, before = steps(tmp_path / "run"), [counted(hosts, host) for host in range(1, 5)]
        wait_for(lambda: time.monotonic() - before[0][0] > 30 and steps(tmp_path / "run") > decided, "no further step")
        found = [rates(*pair) for pair in zip(before, [counted(hosts, host) for host in range(1, 5)], strict=True)]
    print([[f"{rate / MBIT:.2f}" for rate in way] for way in found])
    assert max(sent for sent, _ in found) > 0.5 * cap, "the cap is what holds them up"
    for sent, received in found:
        assert sent < 1.05 * cap
        assert received < 1.05 * 2 * cap
