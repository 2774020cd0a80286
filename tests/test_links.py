"""Neighbours' links, in one process but over real sockets and TLS: who may open one, what may come over it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest
from waiting import PATIENCE, until

from protomodels_cli import timeouts
from protomodels_cli.bench.link import measure_link
from protomodels_cli.protocol.messages import BadMessage, CreditExceeded, CreditNotDue
from protomodels_cli.protocol.schedule import View, next_work
from protomodels_cli.spec.link import parse_link
from protomodels_cli.wire import frames
from protomodels_cli.wire.channels import CHANNEL_OPTIONS
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.wire.frames import Message, frames_of
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.tls import Identity, new_authority, peer_name
from protomodels_cli.worker import links
from protomodels_cli.worker.links import LINK, Link, dial
from protomodels_cli.worker.listener import Listener

AUTHORITY = new_authority()


def identity(peer: str) -> Identity:
    return AUTHORITY.issue_with_key(peer_name(peer))


class End:
    """One end of a link and what it was given."""

    def __init__(self, neighbour: str, to_next: bool, window: int = 4, connection: Connection | None = None):
        self.got: list[Message] = []
        self.credits, self.sent = 0, 0
        every, told = max(1, window // 2), (self.got.append, self._count_sent, self._count_credits)
        self.link = Link(1, 0, neighbour, to_next, window, every, 1 << 24, *told, connection)

    def _count_sent(self) -> None:
        self.sent += 1

    def _count_credits(self, messages: int) -> None:
        self.credits += messages


def message(leg: str = "forward", step: int = 1, microbatch: int = 0, size: int = 10) -> Message:
    return Message(
        leg, step, microbatch, 0, b"ids" if leg != "backward" else b"", bytes(range(256)) * (size // 256 + 1)
    )


def linked(story: Callable[[End, End], Awaitable[None]], window: int = 4, line: str | None = None) -> None:
    """Peers a and b with a link between their stages 0 and 1; a dials. `line`: of both."""

    async def run() -> None:
        listener = Listener(identity("b"))
        await listener.start("127.0.0.1", 0)
        lines = [None if line is None else Connection(parse_link(line)) for _ in range(2)]
        a, b = End("b", True, window, lines[0]), End("a", False, window, lines[1])
        listener.expect(b.link)
        dialling = asyncio.create_task(dial(a.link, "127.0.0.1", listener.port, identity("a")))
        try:
            await until(lambda: a.link.open.is_set() and b.link.open.is_set())
            await asyncio.wait_for(story(a, b), PATIENCE)
        finally:
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)
            await listener.stop()

    asyncio.run(run())


def test_messages_go_both_ways_whole_and_in_order(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", 1000)

    async def story(a: End, b: End) -> None:
        down = [message("forward", 1, m, 700 * m) for m in range(6)] + [message("evaluation", 1, 0)]
        up = [message("backward", 1, m, 2500) for m in range(6)]
        for m in down:
            a.link.send(m)
        for m in up:
            b.link.send(m)
        await until(lambda: len(b.got) == 7 and len(a.got) == 6 and a.sent == 7)
        assert b.got == down
        assert a.got == up
        assert a.link.bytes_sent["forward"] > sum(len(m.payload) + 3 for m in down[:6])

    linked(story, window=8)


def test_who_sends_beyond_its_credit_or_takes_what_was_not_sent_is_cut_off():
    async def floods(a: End, b: End) -> None:
        for m in range(5):
            a.link.send(message(microbatch=m))
        await b.link.closed.wait()
        assert isinstance(b.link.error, CreditExceeded)
        assert b.link.error.window == 4
        assert len(b.got) == 4

    async def lies(a: End, b: End) -> None:
        for _ in range(2):
            b.link.take()
        await a.link.closed.wait()
        assert isinstance(a.link.error, CreditNotDue)
        assert (a.link.error.taken, a.link.error.sent) == (2, 0)

    linked(floods)
    linked(lies)


@pytest.fixture
def impatient(monkeypatch):
    for name, seconds in (("LINK_SILENT", 1.0), ("LINK_LOOK_EVERY", 0.1), ("LINK_ASK_EVERY", 0.2)):
        monkeypatch.setattr(timeouts, name, seconds)


def test_who_gets_no_answers_but_hears_the_other_does_not_give_up(impatient):
    """As where its own line is full: its questions are on their way for long."""

    async def story(a: End, b: End) -> None:
        b.link._hear = lambda fields: None
        await asyncio.sleep(2.5)
        assert a.link.mended.is_set()
        assert b.link.mended.is_set()
        assert a.link.streams == b.link.streams == 1

    linked(story)


def test_who_stood_still_reads_before_it_gives_up(impatient):
    async def story(a: End, b: End) -> None:
        await asyncio.sleep(0.3)
        time.sleep(2)
        await asyncio.sleep(0.7)
        assert a.link.mended.is_set()
        assert b.link.mended.is_set()
        assert a.link.streams == b.link.streams == 1

    linked(story)


def test_a_link_says_whether_something_waits_for_its_line():
    async def story(a: End, b: End) -> None:
        await until(lambda: not a.link.sending)
        a.link.send(message(size=1 << 20))
        assert a.link.sending
        await until(lambda: a.sent == 1)
        assert not a.link.sending
        a.link.send(message(microbatch=1))
        a.link.mended.clear()
        assert not a.link.sending, "a broken link needs no line"

    linked(story)


def test_a_closed_link_delivers_nothing_more():
    async def story(a: End, b: End) -> None:
        a.link.send(message())
        await until(lambda: len(b.got) == 1)
        b.link.close()
        await b.link.closed.wait()
        a.link.send(message(microbatch=1))
        await asyncio.sleep(0.1)
        assert len(b.got) == 1

    linked(story)


def test_what_a_link_is_reading_or_writing_when_it_is_closed_counts_no_more():
    """Tasks end a few turns of the event loop after they are cancelled, and a generation is over at once: a message
    that came through meanwhile would be the first in the queue of the next one."""

    class Wire:
        def __init__(self) -> None:
            self.coming: asyncio.Queue[bytes] = asyncio.Queue()
            self.gone: list[bytes] = []
            self.read = self.coming.get

        async def write(self, frame: bytes) -> None:
            self.gone.append(frame)

    async def story() -> None:
        wire, end = Wire(), End("a", to_next=True)
        wire.coming.put_nowait(End("b", to_next=False).link.opening())
        serving = asyncio.create_task(end.link.run(wire))
        await end.link.open.wait()
        await asyncio.sleep(0)
        end.link.send(message())
        await until(lambda: end.sent == 1)
        end.link.send(message(microbatch=1))
        (frame,) = frames_of(message("backward"), generation=1)
        frame.fields.taken = 1
        wire.coming.put_nowait(frame.to_bytes())
        end.link.close()  # both have been handed over, and neither task has run
        await asyncio.gather(serving, return_exceptions=True)
        assert (end.got, end.credits, end.sent, len(wire.gone)) == (
            [],
            0,
            1,
            3,
        )  # the first frame, a question, a message

        late = End("a", to_next=True)
        late.link.close()
        await late.link.run(wire)  # it was closed while it was being opened
        assert not late.link.open.is_set()

    asyncio.run(story())


def test_credits_come_back_with_frames_or_after_half_a_window():
    async def story(a: End, b: End) -> None:
        for m in range(4):
            a.link.send(message(microbatch=m))
        await until(lambda: len(b.got) == 4)
        b.link.take()
        await asyncio.sleep(0.05)
        assert a.credits == 0, "one of a window of four is not worth a frame"
        b.link.take()
        await until(lambda: a.credits == 2)
        b.link.take()
        b.link.send(message("backward"))
        await until(lambda: a.credits == 3)

    linked(story)


def test_the_round_trip_is_measured_at_once_and_again(monkeypatch):
    monkeypatch.setattr(timeouts, "LINK_ASK_EVERY", 0.05)

    async def story(a: End, b: End) -> None:
        await until(lambda: len(a.link._round_trips) > 1)
        assert (first := a.link.round_trip) > b.link.round_trip == 0, "one end asks"
        monkeypatch.setattr(b.link, "_hear", lambda fields: None)  # its answers would take for ever
        questions = a.link._questions
        await until(lambda: a.link._questions > questions + 2)
        assert a.link.round_trip <= first
        a.link._hear(pb.Frame(answered=1 << 60))  # the answer to nothing
        assert len(a.link._asked) == 1, "what is not answered is forgotten"

    linked(story)


def test_over_slow_lines_the_round_trip_is_twice_their_latency():
    async def story(a: End, b: End) -> None:
        await until(lambda: a.link.round_trip > 0)
        assert a.link.round_trip >= 0.08

    linked(story, line="8mbit,40ms")


def test_who_asks_and_does_not_read_is_not_answered_for_ever():
    end = End("b", to_next=False)
    for _ in range(10 * links.MOST_WAITING):
        end.link._hear(pb.Frame(asked=7))
    assert end.link._outbox.qsize() == links.MOST_WAITING


def test_frames_of_another_generation_are_dropped_and_counted():
    async def story(a: End, b: End) -> None:
        a.link.generation = 0
        a.link.send(message())
        a.link.generation = 1
        a.link.send(message(microbatch=1))
        await until(lambda: bool(b.got))
        assert [m.microbatch for m in b.got] == [1]
        assert b.link.refused == 1

    linked(story)


def test_a_leg_from_the_wrong_side_breaks_the_link():
    async def story(a: End, b: End) -> None:
        a.link.send(message("backward"))
        await b.link.closed.wait()
        assert isinstance(b.link.error, BadMessage)
        assert b.link.error.kind == "wrong_side"
        assert b.got == []

    linked(story)


def test_only_the_neighbour_may_open_a_link():
    """A peer of the same run with a good certificate, a stranger without one, and the neighbour of last generation."""

    async def refusal(port: int, who: Identity | None, generation: str) -> grpc.StatusCode:
        key, chain = (who.key_pem, who.certificate_pem) if who else (None, None)
        credentials = grpc.ssl_channel_credentials(AUTHORITY.certificate_pem, key, chain)
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer_name("b"))]
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            call = channel.stream_stream(LINK)(metadata=(("generation", generation), ("boundary", "0")))
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
            return caught.value.code()

    async def run() -> list[grpc.StatusCode]:
        listener, b = Listener(identity("b")), End("a", to_next=False)
        await listener.start("127.0.0.1", 0)
        listener.expect(b.link)
        codes = [
            await refusal(listener.port, identity("c"), "1"),
            await refusal(listener.port, identity("a"), "7"),
            await refusal(listener.port, identity("a"), "junk"),
            await refusal(listener.port, new_authority().issue_with_key(peer_name("a")), "1"),
            await refusal(listener.port, None, "1"),
        ]
        await listener.stop()
        assert not b.link.open.is_set()
        return codes

    denied, junk, unavailable = (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAVAILABLE,
    )
    assert asyncio.run(run()) == [denied, denied, junk, unavailable, unavailable]


def test_a_dialler_knows_whom_it_dialled():
    """At the neighbour's address another peer of the run answers: its certificate says so."""

    async def run() -> None:
        listener = Listener(identity("c"))
        await listener.start("127.0.0.1", 0)
        a = End("b", to_next=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await dial(a.link, "127.0.0.1", listener.port, identity("a"))
        assert not a.link.open.is_set()
        await listener.stop()

    asyncio.run(run())


def test_the_benchmark_of_a_link_carries_all_its_messages():
    [row] = measure_link([(3000, 9)])["rows"]
    assert row["message_bytes"] == 3000
    assert row["gigabytes_per_s"] > 0


@pytest.mark.parametrize(
    ("view", "right"),
    [
        (View(gradient=True, input=True, in_flight=1, on_the_way=0, limit=2), "backward"),
        (View(gradient=False, input=True, in_flight=1, on_the_way=0, limit=2), "forward"),
        (View(gradient=False, input=True, in_flight=2, on_the_way=0, limit=2), None),
        (View(gradient=False, input=True, in_flight=0, on_the_way=2, limit=2), None),
        (View(gradient=True, input=False, in_flight=2, on_the_way=2, limit=2), "backward"),
        (View(gradient=False, input=False, in_flight=0, on_the_way=0, limit=2), None),
    ],
)
def test_backward_first_and_forward_within_the_limits(view, right):
    assert next_work(view) == right
