"""Parts yield to activations: the pace by itself, and beside messages on one emulated line, in its own time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emulated import in_own_time

from protomodels_cli.cost.line import wire_bytes
from protomodels_cli.spec.link import parse_link
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.emulated import Connection, Stream
from protomodels_cli.worker.snapshots.flow import Flow, Throttle
from protomodels_cli.worker.snapshots.pacing import LEAST_WINDOW, MOST_WINDOW, SMALLEST, TARGET, Pace

LEAST = 5e5  # bytes a second
LINK, LATENCY = "80mbit,25ms", 0.025
MESSAGE = 1 << 18  # bytes
ON_THE_LINE = wire_bytes(MESSAGE) / 1e7  # seconds
AHEAD = 4  # messages that may be under way
MESSAGES = 60
PART = 1 << 30


def played(pace: Pace, seconds: float, needed: bool, rate: float = 1e7, base: float = 0.05, other: float = 0.0) -> int:
    """A transfer over a line with a queue that others keep `other` seconds long. Returns the bytes that arrived."""
    now, free, coming, arrived = 0.0, 0.0, list[tuple[float, float, int]](), 0
    while now < seconds:
        while coming and coming[0][0] <= now:
            due, left, size = coming.pop(0)
            pace.arrived(now, size, due - left + 1000.0, now - left)  # by another clock
            arrived += size
        size, pause = pace.next_piece(now, needed)
        if size:
            pace.sent(now, size)
            free = max(free, now + other) + size / rate
            coming.append((free + base, now, size))
        else:
            assert pause > 0
            now = min(now + pause, coming[0][0] if coming else now + pause)
    return arrived


def test_a_line_that_nobody_needs_is_filled_and_its_queue_stays_short():
    pace = Pace(LEAST)
    assert played(pace, 10.0, needed=False) > 0.85 * 10.0 * 1e7
    assert pace.in_flight <= (0.05 + 2 * TARGET) * 1e7


def test_what_the_stage_needs_is_left_to_it_but_for_the_least_rate():
    assert played(Pace(LEAST), 20.0, needed=True) == pytest.approx(20.0 * LEAST, rel=0.05)


def test_a_transfer_that_somebody_waits_for_yields_to_nothing():
    assert played(Pace(LEAST, urgent=True), 10.0, needed=True) > 0.95 * 10.0 * 1e7


def test_a_queue_that_others_fill_is_not_made_longer():
    """It was short before, which is how it shows."""
    pace = Pace(LEAST)
    played(pace, 2.0, needed=False)
    before = pace._window
    for i in range(200):
        pace.sent(2.0 + i / 100, SMALLEST)
        pace.arrived(2.0 + i / 100, SMALLEST, 1000.05 + 4 * TARGET, 0.1)
    assert before > 10 * LEAST_WINDOW
    assert pace._window == LEAST_WINDOW


def test_delays_while_the_stage_needs_the_line_say_nothing_of_others():
    pace = Pace(LEAST)
    played(pace, 2.0, needed=False)
    before = pace._window
    for i in range(50):
        now = 2.0 + i / 10
        pace.sent(now, SMALLEST)
        pace.next_piece(now, needed=True)
        pace.arrived(now, SMALLEST, 1001.0, 1.0)
    assert pace._window == before


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(["sent", "arrived"]), st.booleans(), st.floats(0, 0.1), st.floats(0, 0.3)),
        max_size=150,
    )
)
def test_no_story_makes_a_pace_send_too_much_or_stand_still(story):
    pace, now, flying = Pace(LEAST), 0.0, list[int]()
    for what, needed, wait, delay in story:
        now += wait
        if what == "arrived" and flying:
            pace.arrived(now, flying.pop(0), delay, delay + 0.05)
        size, pause = pace.next_piece(now, needed)
        assert (size > 0) != (pause > 0)
        assert size <= PIECE
        if size:
            pace.sent(now, size)
            flying.append(size)
        assert pace.in_flight == sum(flying) <= max(MOST_WINDOW, LEAST) + PIECE
        assert LEAST_WINDOW <= pace._window <= MOST_WINDOW
    for size in flying:
        pace.arrived(now, size, 0.0, 0.05)
    now += SMALLEST / LEAST * 64
    assert pace.next_piece(now, needed=True)[0] > 0, "the least rate is due whatever was before"


class Home:
    """A stage's line, the messages on it, and a transfer beside them. What crosses it takes the time that it takes."""

    def __init__(self, urgent: bool) -> None:
        self.connection = Connection(parse_link(LINK))
        self.needed = False
        self.pace = Pace(LEAST, urgent)
        self.flow = Flow(self.pace, lambda: self.needed, Throttle(None))

    async def upload(self) -> None:
        home, loop = self, asyncio.get_running_loop()

        class Coordinator:
            async def write(self, frame: bytes) -> None:
                loop.call_later(LATENCY, home.flow.arrived_there, loop.time())

            async def read(self) -> bytes:
                return await asyncio.Future()

        async with self.connection.over(Coordinator(), 1) as slow:
            left = PART
            while left > 0:
                left -= (size := min(left, await self.flow.turn()))
                self.flow.sent(size)
                await slow.write(bytes(size))

    async def fetch(self) -> None:
        asked: asyncio.Queue[tuple[int, float]] = asyncio.Queue()  # sizes, and when the coordinator hears of it
        clocks = list[float]()

        class Coordinator:
            async def write(self, frame: bytes) -> None: ...

            async def read(self) -> bytes:
                size, heard = await asked.get()
                clocks.append(heard)
                await asyncio.sleep(heard + LATENCY - asyncio.get_running_loop().time())
                return bytes(size)

        async def ask() -> None:
            for _ in itertools.count():
                size = await self.flow.turn()
                self.flow.sent(size)
                asked.put_nowait((size, asyncio.get_running_loop().time() + LATENCY))

        asking, came = asyncio.create_task(ask()), 0
        async with self.connection.over(Coordinator(), 1) as slow:
            while came < PART:
                came += len(await slow.read())
                self.flow.arrived_here(clocks.pop(0))
        asking.cancel()

    async def send(self) -> None:
        """A message after each piece of work, which takes half as long again as the message on the line."""
        outbox: asyncio.Queue[bytes] = asyncio.Queue()
        arrived = 0

        class Neighbour:
            async def write(self, frame: bytes) -> None:
                nonlocal arrived
                arrived += 1

            async def read(self) -> bytes:
                return await asyncio.Future()

        async def write(slow: Stream) -> None:
            while True:
                frame = await outbox.get()
                self.needed = True
                await slow.write(frame)
                self.needed = not outbox.empty()

        async with self.connection.over(Neighbour(), 2) as slow:
            writing = asyncio.create_task(write(slow))
            for i in range(MESSAGES):
                while i - arrived >= AHEAD:  # credits
                    await asyncio.sleep(0.001)
                await asyncio.sleep(1.5 * ON_THE_LINE)
                outbox.put_nowait(bytes(MESSAGE))
            while arrived < MESSAGES:
                await asyncio.sleep(0.001)
            writing.cancel()

    async def receive(self) -> None:
        """Messages come as fast as the neighbour's line allows, a few ahead, and each is computed with for half as long
        again."""
        inbox, taken = list[bytes](), 0
        self.needed = True

        class Neighbour:
            def __init__(self) -> None:
                self.sent = 0

            async def write(self, frame: bytes) -> None: ...

            async def read(self) -> bytes:
                while self.sent - taken >= AHEAD:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(ON_THE_LINE)
                self.sent += 1
                return bytes(MESSAGE)

        async def read(slow: Stream) -> None:
            for _ in range(MESSAGES):
                inbox.append(await slow.read())
                self.needed = False

        async with self.connection.over(Neighbour(), 2) as slow:
            reading = asyncio.create_task(read(slow))
            while taken < MESSAGES:
                if inbox:
                    inbox.pop()
                    taken += 1
                    self.needed = not inbox
                    await asyncio.sleep(1.5 * ON_THE_LINE)
                else:
                    await asyncio.sleep(0.001)
            await reading


WAYS = {"upload": (Home.upload, Home.send), "fetch": (Home.fetch, Home.receive)}


def measured(
    transfer: Callable[[Home], Awaitable[None]] | None, steps: Callable[[Home], Awaitable[None]], urgent: bool = False
) -> tuple[float, int]:
    """Seconds of the messages, and bytes of the transfer beside them."""

    async def run() -> tuple[float, int]:
        home = Home(urgent)
        beside = asyncio.create_task(transfer(home)) if transfer else None
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0)  # the transfer is well under way
        began, before = loop.time(), home.pace.delivered
        await steps(home)
        took = loop.time() - began
        if beside is not None:
            assert not beside.done(), "it was under way all the time"
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        return took, home.pace.delivered - before

    return in_own_time(run())


@pytest.mark.parametrize("way", WAYS)
def test_activations_are_not_slowed_by_more_than_a_tenth(way: str):
    transfer, steps = WAYS[way]
    alone, _ = measured(None, steps)
    beside, moved = measured(transfer, steps)
    pushed, _ = measured(transfer, steps, urgent=True)
    free = (beside - MESSAGES * ON_THE_LINE) * 1e7
    print(
        f"{way}: {alone:.2f} s, beside a transfer {beside:.2f} s ({moved / free:.0%} of what was free), {pushed:.2f} s"
    )
    assert beside <= 1.10 * alone
    assert pushed >= 1.15 * alone, "the line is what they share"
    assert moved >= 0.3 * free, "and the transfer has a good part of what they leave"


def test_a_message_that_comes_upon_an_upload_hardly_waits_for_it():
    """Each of a few small ones, with the line otherwise the upload's."""

    async def waits(transfer: bool) -> float:
        home, loop, came = Home(urgent=False), asyncio.get_running_loop(), list[float]()
        beside = asyncio.create_task(home.upload() if transfer else asyncio.sleep(0))

        class Neighbour:
            async def write(self, frame: bytes) -> None:
                came.append(loop.time())

            async def read(self) -> bytes:
                return await asyncio.Future()

        left = list[float]()
        async with home.connection.over(Neighbour(), 2) as slow:
            for i in range(20):
                await asyncio.sleep(0.3 + 0.007 * i)
                left.append(loop.time())
                home.needed = True
                await slow.write(bytes(1000))
                home.needed = False
            await asyncio.sleep(1.0)
        beside.cancel()
        return max(end - begin for begin, end in zip(left, came, strict=True))

    assert in_own_time(waits(True)) <= in_own_time(waits(False)) + 0.015
