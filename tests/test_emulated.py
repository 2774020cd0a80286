"""The slow link inside the transport: its arithmetic, and real streams over it."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_time import in_own_time

from protomodels_cli.cost.line import Line, reno_rate, segments, wire_bytes
from protomodels_cli.spec.link import parse_link
from protomodels_cli.wire.emulated import Connection


def test_bytes_on_the_line_are_those_of_ethernet():
    assert segments(1000) == 1
    assert wire_bytes(1000) == 1000 + 45 + 66
    assert segments(1 << 20) == math.ceil(((1 << 20) + 64 * 45) / 1448)
    assert 1.04 < wire_bytes(1 << 20) / (1 << 20) < 1.06


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(1, 1e6)), min_size=1))
def test_a_line_is_never_faster_than_its_rate(sends):
    line, last = Line(8e6), 0.0
    for ready, size in sends:
        left = line.leave(ready, size)
        assert left >= max(ready, last) + size / 1e6 - 1e-9
        last = left
    assert last <= max(ready for ready, _ in sends) + sum(size for _, size in sends) / 1e6 + 1e-6


def test_a_downlink_delays_only_what_comes_at_the_same_time():
    down = Line(8e6)  # 1 MB/s
    assert down.arrive(5.0, 1e6) == 5.0  # it came in while the other side sent
    assert down.arrive(5.0, 1e6) == 6.0  # this one had to wait for the first
    assert down.arrive(9.0, 1e6) == 9.0


def test_loss_slows_a_stream_as_it_does_tcp():
    assert math.isinf(reno_rate(parse_link("80mbit,25ms")))
    assert reno_rate(parse_link("80mbit,25ms,0ms,0.01")) == pytest.approx(2.84e6, rel=0.01)


class Pipe:
    """A stream to nowhere: what is written can be looked at, with its time."""

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []

    async def write(self, frame: bytes) -> None:
        self.came.append((asyncio.get_running_loop().time(), frame[0]))

    async def read(self) -> bytes:
        await asyncio.sleep(3600)
        raise AssertionError


def over(link: str, streams: int, frames: int, size: int) -> list[list[tuple[float, int]]]:
    """Frames written to several streams of one connection; when they came out, from the first write on."""

    async def run() -> list[list[tuple[float, int]]]:
        connection, pipes = Connection(parse_link(link)), [Pipe() for _ in range(streams)]
        began = asyncio.get_running_loop().time()

        async def send(pipe: Pipe, seed: int) -> None:
            async with connection.over(pipe, seed) as slow:
                for step in range(frames):
                    await slow.write(bytes([step]) + bytes(size - 1))
                async with asyncio.timeout(3600):  # of the loop's own time
                    while len(pipe.came) < frames:
                        await asyncio.sleep(0.001)

        await asyncio.gather(*(send(pipe, seed) for seed, pipe in enumerate(pipes)))
        return [[(when - began, step) for when, step in pipe.came] for pipe in pipes]

    return in_own_time(run())


def test_rate_and_latency_are_kept():
    [came] = over("8mbit,100ms", 1, 10, 50_000)
    assert [step for _, step in came] == list(range(10))
    each = wire_bytes(50_000) / 1e6
    assert [when for when, _ in came] == pytest.approx([n * each + 0.1 for n in range(1, 11)], abs=1e-3)


def test_two_streams_share_one_uplink_fairly():
    came = over("8mbit,0ms", 2, 5, 50_000)
    each = wire_bytes(50_000) / 1e6
    ends = sorted(stream[-1][0] for stream in came)
    assert ends[1] == pytest.approx(10 * each, abs=1e-3)
    assert ends[0] > 8 * each, "neither waits for all of the other's"


def test_a_broken_stream_breaks_the_next_write():
    class Broken(Pipe):
        async def write(self, frame: bytes) -> None:
            raise ConnectionResetError("gone")

    async def run() -> None:
        async with Connection(parse_link("none,1ms")).over(Broken(), 0) as slow:
            await slow.write(b"frame")
            await asyncio.sleep(0.05)  # of the loop's own time
            await slow.write(b"frame")

    with pytest.raises(ConnectionResetError, match="gone"):
        in_own_time(run())


def test_what_is_exchanged_with_the_coordinator_shares_the_lines():
    """Over real sockets: a third of the bytes are a neighbour's, two thirds go to the coordinator and come back."""
    size, each = 50_000, wire_bytes(50_000) / 1e6

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(2 * size))
        await writer.drain()
        writer.close()

    async def run() -> tuple[float, float, float]:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        connection, pipe, loop = Connection(parse_link("8mbit,50ms")), Pipe(), asyncio.get_running_loop()
        way = connection.way_to(server.sockets[0].getsockname()[:2])
        reader, writer = await asyncio.open_connection(*way)
        async with connection.over(pipe, 0) as slow:
            began = loop.time()
            writer.write(bytes(2 * size))
            await slow.write(bytes(size))
            back = await reader.readexactly(2 * size)
            ended = loop.time() - began
            assert back == bytes(2 * size)
            assert await reader.read() == b"", "who is hung up on hears of it"
        writer.close()
        await connection.close()
        server.close()
        return pipe.came[0][0] - began, ended, connection.up.free_at - began

    neighbour, coordinator, up = asyncio.run(run())
    assert neighbour > each + 0.05
    assert up >= 2.95 * each, "the neighbour's bytes and the coordinator's left one after another"
    assert coordinator > 4 * each + 0.1, "both ways and a round trip"


def test_jitter_keeps_the_order():
    [came] = over("none,20ms,20ms", 1, 50, 10)
    assert [step for _, step in came] == list(range(50))
    assert 0.02 < came[-1][0] < 0.041
