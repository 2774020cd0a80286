"""A link goes on over a new stream where one breaks: no message is lost, and none comes twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_links import End, linked, message
from waiting import until

from protomodels_cli.protocol.messages import CreditNotDue
from protomodels_cli.wire import frames
from protomodels_cli.wire.frames import Frame, Message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


class BrittleWire:
    """Two ends of a stream that breaks after so many frames: some that were written never arrive."""

    def __init__(self, lasts: int):
        self._left = lasts
        self._ways: tuple[asyncio.Queue[bytes], ...] = (asyncio.Queue(), asyncio.Queue())

    def end(self, i: int) -> Any:
        async def write(frame: bytes) -> None:
            if self._left <= 0:
                raise ConnectionError
            self._ways[i].put_nowait(frame)

        async def read() -> bytes:
            frame = await self._ways[1 - i].get()
            self._left -= 1
            if self._left <= 0:
                raise ConnectionError
            return frame

        return type("Stream", (), {"read": staticmethod(read), "write": staticmethod(write)})()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 25), max_size=8), st.integers(1, 9))
def test_no_message_is_lost_or_comes_twice_whenever_streams_break(lasts, every):
    """Messages of several frames both ways, taken now and then, over streams that break after so many frames."""

    async def run() -> None:
        a, b = End("b", to_next=True, window=30), End("a", to_next=False, window=30)
        down = [message("forward", 1, m, 600 * (m % 3)) for m in range(12)]
        up = [message("backward", 1, m, 900) for m in range(12)]
        for i, m in enumerate(down):
            a.link.send(m)
            b.link.send(up[i])
        for end in (a, b):
            add = end.link._deliver

            def deliver(m: Message, end: End = end, add: Any = add) -> None:
                add(m)
                if len(end.got) % every == 0:
                    end.link.take()

            end.link._deliver = deliver
        for last in [*lasts, 10**6]:
            wire = BrittleWire(last)
            ends = [asyncio.create_task(end.link.run(wire.end(i))) for i, end in enumerate((a, b))]
            done = asyncio.create_task(until(lambda: len(a.got) == len(b.got) == 12))
            await asyncio.wait([*ends, done], return_when=asyncio.FIRST_COMPLETED)
            for task in (*ends, done):
                task.cancel()
            await asyncio.gather(*ends, done, return_exceptions=True)
        assert (b.got, a.got) == (down, up)
        assert (a.sent, b.sent) == (12, 12)
        assert not a.link.closed.is_set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "PIECE", 300)
        asyncio.run(run())


def test_a_neighbour_that_says_it_had_what_was_never_sent_is_cut_off():
    async def story(a: End, b: End) -> None:
        lying = Frame(pb.Frame(generation=1, came=3))
        with pytest.raises(CreditNotDue):
            a.link._go_on_behind(lying)

    linked(story)


def test_a_stream_of_the_same_neighbour_takes_the_place_of_the_one_before():
    """Its own end of that was cut off, which nobody here has noticed yet."""

    async def run() -> None:
        a, b = End("b", to_next=True), End("a", to_next=False)
        old, new = BrittleWire(10**6), BrittleWire(10**6)
        tasks = [asyncio.create_task(end.link.run(old.end(i))) for i, end in enumerate((a, b))]
        a.link.send(message())
        await until(lambda: len(b.got) == 1)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        tasks += [asyncio.create_task(end.link.run(new.end(i))) for i, end in enumerate((a, b))]
        a.link.send(message(microbatch=1))
        await until(lambda: len(b.got) == 2)
        assert tasks[1].done()
        assert (a.link.streams, b.link.streams, a.link.resent) == (2, 2, 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
