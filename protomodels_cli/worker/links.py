"""One boundary's link, from either end: messages out, messages in, and credits for what was taken.

A link sends in the order it is given, one message at a time, over one stream after another: where a stream breaks, the
next one begins with how many messages each side has had, and goes on behind them. So a message is kept until the other
side has taken it. Which side dialled makes no difference once a stream is open.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import grpc

from protomodels_cli import timeouts
from protomodels_cli.protocol.messages import BadMessage, CreditExceeded, CreditNotDue, Leg
from protomodels_cli.wire.channels import CHANNEL_OPTIONS
from protomodels_cli.wire.emulated import Connection, Stream
from protomodels_cli.wire.frames import Allocate, Assembler, Frame, Message, frames_of, ordinary_memory
from protomodels_cli.wire.join_link import address
from protomodels_cli.wire.path import is_relayed
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.tls import Identity, peer_name

METHOD = pb.DESCRIPTOR.services_by_name["Neighbour"].methods_by_name["Link"]
RECONNECT = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000)]
ASKED_LATELY = 30  # round trips that count
FRESH = 4.0  # seconds since the last word over a direct stream, in which no relayed one replaces it
MOST_WAITING = 256  # frames: behind more of them nothing is answered, nor for a neighbour that asks and does not read
LINK = f"/{METHOD.containing_service.full_name}/{METHOD.name}"


class _Outbox(asyncio.PriorityQueue[tuple[bool, int, Frame | None]]):
    """Frames in order, and before them what must not wait behind a long message. None: the end of a message."""

    def __init__(self) -> None:
        super().__init__()
        self._added = 0

    def add(self, frame: Frame | None, at_once: bool = False) -> None:
        self._added += 1
        self.put_nowait((not at_once, self._added, frame))


class Link:
    """The link over `boundary` of one generation; `to_next` where the other end is the next stage."""

    def __init__(
        self,
        generation: int,
        boundary: int,
        neighbour: str,
        to_next: bool,
        window: int,
        credit_every: int,
        most_bytes: int,
        deliver: Callable[[Message], None],
        has_sent: Callable[[], None],
        credited: Callable[[int], None],
        connection: Connection | None = None,
        allocate: Allocate = ordinary_memory,
        opened: Callable[[str], None] = lambda path: None,
    ):
        self._opened = opened  # is told the path of every stream
        self.hears_punch: Callable[[pb.Punch], None] = lambda punch: None
        self.path = ""  # of the last stream: loopback, lan, public, punched, relay HOST:PORT, door
        self._last_word = 0.0  # when something last arrived
        self.generation, self.boundary, self.neighbour, self.to_next = generation, boundary, neighbour, to_next
        self._deliver, self._has_sent, self._credited = deliver, has_sent, credited
        self._connection = connection  # where a slow one is emulated
        self._window, self._credit_every = window, credit_every
        legs: tuple[Leg, ...] = ("backward",) if to_next else ("forward", "evaluation")
        self._assembler = Assembler(most_bytes, legs, self._check_credit, allocate)
        self._outbox = _Outbox()
        self._kept: deque[Message] = deque()  # those that the neighbour has not taken yet, the last ones sent
        self._taken = self._told = self._heard = 0  # messages taken here, told to the neighbour, taken there
        self._came = self._went = self._left = 0  # messages; the last: those that have left this process once
        self._writing = 0  # messages written to this stream, and those that it did not have to carry
        self.neighbour_stage = boundary + 1 if to_next else boundary
        self.open = asyncio.Event()  # a stream was, once
        self.broken, self.mended = asyncio.Event(), asyncio.Event()  # no stream any more, until there is another
        self.closed = asyncio.Event()  # for good: an error of the neighbour's, or the end of the generation
        self.error: Exception | None = None
        self._serving: asyncio.Future[None] | None = None
        self._over = False
        self.bytes_sent = {"forward": 0, "backward": 0, "evaluation": 0, "credit": 0}
        self.refused = 0
        self.streams = self.resent = 0  # that were opened; messages that one of them lost
        self._asked: dict[int, float] = {}  # questions on their way, and when they left
        self._round_trips: deque[float] = deque(maxlen=ASKED_LATELY)
        self._questions = 0

    def send(self, message: Message) -> None:
        self._went += 1
        self._kept.append(message)
        if self.mended.is_set():
            self._queue_message(message)

    @property
    def sending(self) -> bool:
        """Whether something waits for the line that leads to the neighbour."""
        return self.mended.is_set() and not self._outbox.empty()

    @property
    def round_trip(self) -> float:
        """Seconds to the neighbour and back: the least of the last ones, which had the fewest messages before them. 0:
        not known."""
        return min(self._round_trips, default=0.0)

    def _queue_message(self, message: Message) -> None:
        for frame in frames_of(message, self.generation):
            self._queue(frame, message.leg)
        self._outbox.add(None)

    def take(self) -> None:
        """Give credit for a message from this link, which is being computed with. Other frames carry the credit; one
        of its own goes out only after so many messages without any."""
        self._taken += 1
        if self._taken - self._told >= self._credit_every and self.mended.is_set():
            self._queue(Frame(pb.Frame(generation=self.generation)), "credit")

    def say_punch(self, punch: pb.Punch) -> None:
        """To the neighbour, where a stream is open."""
        if self.mended.is_set():
            self._queue(Frame(pb.Frame(generation=self.generation, punch=punch)), "credit", at_once=True)

    def _queue(self, frame: Frame, leg: str, at_once: bool = False) -> None:
        frame.fields.taken = self._told = self._taken
        self.bytes_sent[leg] += frame.size
        self._outbox.add(frame, at_once)

    def opening(self) -> bytes:
        """The first frame of a stream."""
        self._told = self._taken
        return Frame(pb.Frame(generation=self.generation, taken=self._taken, came=self._came)).to_bytes()

    @property
    def relayed(self) -> bool:
        """Whether it goes, or went last, through a relay."""
        return is_relayed(self.path)

    @property
    def quiet(self) -> bool:
        """Whether the neighbour has taken all that it was sent."""
        return not self._kept

    async def leave_stream(self) -> None:
        """Nothing goes in or out until the next stream is open: what it begins with is as things are now."""
        if self._serving is not None and not self._serving.done():
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def run(self, stream: Stream, opened: bool = False, path: str = "") -> None:
        """Serve the stream until it ends; one that was served before is dead, whatever it says, unless it is direct,
        lives, and this one is not: then both ends were looking at once. `opened`: the first frame has been sent."""
        lives = self.mended.is_set() and time.monotonic() - self._last_word < FRESH
        if lives and is_relayed(path) and not self.relayed:
            return
        await self.leave_stream()
        if self._over or self.error is not None:
            return
        self._serving = serving = asyncio.ensure_future(self._serve_over(stream, opened, path))
        try:
            await serving
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not serving.cancelled():
                raise
            # Left, or replaced: the call ends as calls do, or the other end would never hear of it.
        except BadMessage as error:
            self.error = error
            raise
        finally:
            serving.cancel()
            if self._serving is serving:  # no other stream has taken its place
                self.mended.clear()
                self.broken.set()
            if self._over or self.error is not None:
                self.closed.set()

    def close(self) -> None:
        """End the link with its generation: nothing goes in or out any more, not even what has been read already."""
        self._over = True
        self.closed.set()
        if self._serving is not None:
            self._serving.cancel()

    async def _serve_over(self, stream: Stream, opened: bool, path: str) -> None:
        if not opened:
            await stream.write(self.opening())
        first = await stream.read()
        if first is grpc.aio.EOF or self._over:
            return
        self._go_on_behind(Frame.from_bytes(first))
        self.path, self._last_word = path, time.monotonic()
        self._opened(path)
        if self._connection is None:
            await self._serve(stream)
        else:
            async with self._connection.over(stream, seed=2 * self.boundary + self.to_next) as slow:
                await self._serve(slow)

    def _go_on_behind(self, first: Frame) -> None:
        """Queue what the neighbour has not had, and nothing else: what was under way on another stream is lost."""
        came = first.fields.came
        self._take_credit(first.fields.taken)
        if not self._heard <= came <= self._went:
            raise CreditNotDue(came, self._went)
        self._outbox = _Outbox()
        self._assembler.reset()
        lost = [*self._kept][came - self._heard :]
        self.resent += max(0, self._left - came)
        for message in lost:
            self._queue_message(message)
        if self._left < came:  # the neighbour had it before this side knew that it was sent
            self._note_left(came)
        self._writing = came
        self.streams += 1
        self.open.set()
        self.broken.clear()
        self.mended.set()

    def _note_left(self, messages: int) -> None:
        while self._left < messages:
            self._left += 1
            self._has_sent()

    async def _serve(self, stream: Stream) -> None:
        tasks = {asyncio.ensure_future(work) for work in (self._read(stream), self._write(stream), self._ask())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, stream: Stream) -> None:
        while True:
            *_, frame = await self._outbox.get()
            if self._over:
                return
            if frame is None:
                self._writing += 1
                self._note_left(self._writing)
            else:
                await stream.write(frame.to_bytes())

    async def _ask(self) -> None:
        """How long the way is: from one end, which is enough. Both say a word every time, and notice when none comes:
        an answer alone could wait long for a question that a full line holds up."""
        self._asked.clear()
        pause = min(timeouts.LINK_LOOK_EVERY, timeouts.LINK_ASK_EVERY)
        due = looked = awake_since = time.monotonic()
        while True:
            now = time.monotonic()
            if now - looked > pause + 2 * timeouts.LINK_LOOK_EVERY:
                awake_since = now  # this process stood still, and messages that came meanwhile are still unread
            looked = now
            if now - max(self._last_word, awake_since) > timeouts.LINK_SILENT:
                raise ConnectionError(f"nothing came for {timeouts.LINK_SILENT:g} s")
            if now >= due:
                due = now + timeouts.LINK_ASK_EVERY
                word = pb.Frame(generation=self.generation)
                if self.to_next:
                    self._questions += 1
                    self._asked = {self._questions: now}  # one that was not answered by now is not waited for
                    word.asked = self._questions
                self._queue(Frame(word), "credit", at_once=True)
            await asyncio.sleep(pause)

    def _hear(self, fields: pb.Frame) -> None:
        """A question, the answer to one, or where the neighbour is seen."""
        if fields.asked and self._outbox.qsize() < MOST_WAITING:
            answer = Frame(pb.Frame(generation=self.generation, answered=fields.asked))
            self._queue(answer, "credit", at_once=True)
        if (asked_at := self._asked.pop(fields.answered, None)) is not None:
            self._round_trips.append(time.monotonic() - asked_at)
        if fields.HasField("punch"):
            self.hears_punch(fields.punch)

    async def _read(self, stream: Stream) -> None:
        while (content := await stream.read()) is not grpc.aio.EOF:
            if self._over:
                return
            self._last_word = time.monotonic()
            frame = Frame.from_bytes(content)
            if frame.fields.generation != self.generation:
                self.refused += 1
                continue
            self._take_credit(frame.fields.taken)
            if frame.fields.leg == pb.Frame.CREDIT:
                self._hear(frame.fields)
                continue
            message = self._assembler.add(frame)
            if message is not None:
                self._came += 1
                self._deliver(message)

    def _take_credit(self, taken: int) -> None:
        if taken > self._went:
            raise CreditNotDue(taken, self._went)
        if taken > self._heard:
            self._credited(taken - self._heard)
            for _ in range(taken - self._heard):
                self._kept.popleft()
            self._heard = taken

    def _check_credit(self) -> None:
        if self._came - self._taken >= self._window:
            raise CreditExceeded(self._window)


def channel_to(link: Link, host: str, port: int, identity: Identity) -> grpc.aio.Channel:
    """To the neighbour, if it is the neighbour who answers there."""
    credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate_pem)
    options = [*CHANNEL_OPTIONS, *RECONNECT, ("grpc.ssl_target_name_override", peer_name(link.neighbour))]
    return grpc.aio.secure_channel(address(host, port), credentials, options)


async def serve_over(channel: grpc.aio.Channel, link: Link, path: str) -> None:
    """Open a stream of the link from this end, in place of one that may be there, and serve it until it breaks."""
    metadata = (("generation", str(link.generation)), ("boundary", str(link.boundary)), ("path", path))
    await link.leave_stream()
    call = channel.stream_stream(LINK)(metadata=metadata, wait_for_ready=True)
    await call.write(link.opening())  # opens the stream at the other end
    await call.initial_metadata()  # … which answers once it knows the link
    await link.run(call, opened=True, path=path)


async def dial(link: Link, host: str, port: int, identity: Identity, path: str = "") -> None:
    async with channel_to(link, host, port, identity) as channel:
        await serve_over(channel, link, path)
