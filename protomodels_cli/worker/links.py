"""One boundary's link, from either end: messages out, messages in, and credits for what was taken.

A link sends in the order it is given, one message at a time, over one stream after another: where a stream breaks, the
next one begins with how many messages each side has had, and goes on behind them. So a message is kept until the other
side has taken it. Which side dialled makes no difference once a stream is open.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc

from protomodels_cli.protocol.messages import BadMessage, CreditExceeded, CreditNotDue, Leg
from protomodels_cli.wire.channels import CHANNEL_OPTIONS, SERVER_OPTIONS
from protomodels_cli.wire.emulated import Connection, Stream
from protomodels_cli.wire.frames import Allocate, Assembler, Frame, Message, frames_of, ordinary_memory
from protomodels_cli.wire.join_link import address
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.tls import Identity, peer_name
from protomodels_cli.worker.problems import PortNotOpened
from protomodels_cli.worker.telling import PeerError

_METHOD = pb.DESCRIPTOR.services_by_name["Neighbour"].methods_by_name["Link"]
RECONNECT = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000)]
ASK_EVERY, ASKED_LATELY = 5.0, 12  # seconds between two looks at the round trip; how many of them count
MOST_WAITING = 256  # frames: behind more of them nothing is answered, nor for a neighbour that asks and does not read
LINK = f"/{_METHOD.containing_service.full_name}/{_METHOD.name}"


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
    ):
        self.generation, self.boundary, self.neighbour, self.to_next = generation, boundary, neighbour, to_next
        self._deliver, self._has_sent, self._credited = deliver, has_sent, credited
        self._connection = connection  # where a slow one is emulated
        self._window, self._credit_every = window, credit_every
        legs: tuple[Leg, ...] = ("backward",) if to_next else ("forward", "evaluation")
        self._assembler = Assembler(most_bytes, legs, self._check_credit, allocate)
        self._outbox: asyncio.Queue[Frame | None] = asyncio.Queue()  # None: the end of a message
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
        self._outbox.put_nowait(None)

    def take(self) -> None:
        """Give credit for a message from this link, which is being computed with. Other frames carry the credit; one
        of its own goes out only after so many messages without any."""
        self._taken += 1
        if self._taken - self._told >= self._credit_every and self.mended.is_set():
            self._queue(Frame(pb.Frame(generation=self.generation)), "credit")

    def _queue(self, frame: Frame, leg: str) -> None:
        frame.fields.taken = self._told = self._taken
        self.bytes_sent[leg] += frame.size
        self._outbox.put_nowait(frame)

    def opening(self) -> bytes:
        """The first frame of a stream."""
        self._told = self._taken
        return Frame(pb.Frame(generation=self.generation, taken=self._taken, came=self._came)).to_bytes()

    async def run(self, stream: Stream, opened: bool = False) -> None:
        """Serve the stream until it ends; one that was served before is dead, whatever it says. `opened`: the first
        frame has been sent."""
        if self._serving is not None and not self._serving.done():
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._over or self.error is not None:
            return
        self._serving = serving = asyncio.ensure_future(self._serve_over(stream, opened))
        try:
            await serving
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

    async def _serve_over(self, stream: Stream, opened: bool) -> None:
        if not opened:
            await stream.write(self.opening())
        first = await stream.read()
        if first is grpc.aio.EOF or self._over:
            return
        self._go_on_behind(Frame.from_bytes(first))
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
        self._outbox = asyncio.Queue()
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
            frame = await self._outbox.get()
            if self._over:
                return
            if frame is None:
                self._writing += 1
                self._note_left(self._writing)
            else:
                await stream.write(frame.to_bytes())

    async def _ask(self) -> None:
        """How long the way is: from one end, which is enough."""
        self._asked.clear()
        while self.to_next:
            self._questions += 1
            self._asked = {self._questions: time.monotonic()}  # one that was not answered by now is not waited for
            self._queue(Frame(pb.Frame(generation=self.generation, asked=self._questions)), "credit")
            await asyncio.sleep(ASK_EVERY)
        await asyncio.Future()

    def _hear(self, fields: pb.Frame) -> None:
        """A question, or the answer to one."""
        if fields.asked and self._outbox.qsize() < MOST_WAITING:
            self._queue(Frame(pb.Frame(generation=self.generation, answered=fields.asked)), "credit")
        if (asked_at := self._asked.pop(fields.answered, None)) is not None:
            self._round_trips.append(time.monotonic() - asked_at)

    async def _read(self, stream: Stream) -> None:
        while (content := await stream.read()) is not grpc.aio.EOF:
            if self._over:
                return
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


async def dial(link: Link, host: str, port: int, identity: Identity) -> None:
    """Open a stream of the link from this end and serve it until it breaks."""
    credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate_pem)
    options = [*CHANNEL_OPTIONS, *RECONNECT, ("grpc.ssl_target_name_override", peer_name(link.neighbour))]
    async with grpc.aio.secure_channel(address(host, port), credentials, options) as channel:
        metadata = (("generation", str(link.generation)), ("boundary", str(link.boundary)))
        call = channel.stream_stream(LINK)(metadata=metadata, wait_for_ready=True)
        await call.write(link.opening())  # opens the stream at the other end
        await call.initial_metadata()  # … which answers once it knows the link
        await link.run(call, opened=True)


class Listener:
    """This peer's own port: neighbours that dial are matched with the links that wait for them."""

    def __init__(self, identity: Identity):
        self._links: dict[tuple[int, int], Link] = {}
        credentials = grpc.ssl_server_credentials(
            [(identity.key_pem, identity.certificate_pem)], identity.authority_pem, require_client_auth=True
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handlers = {_METHOD.name: grpc.stream_stream_rpc_method_handler(self._link)}
        self._server.add_registered_method_handlers(_METHOD.containing_service.full_name, handlers)
        self._credentials = credentials
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        try:
            self.port = self._server.add_secure_port(f"{host}:{port}", self._credentials)
        except RuntimeError:
            raise PeerError(PortNotOpened(port)) from None
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)

    def expect(self, link: Link) -> None:
        self._links[link.generation, link.boundary] = link

    def forget(self) -> None:
        self._links.clear()

    async def _link(self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata() or ())
        try:
            key = int(metadata["generation"]), int(metadata["boundary"])
        except (KeyError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "generation and boundary must be given")
        link = self._links.get(key)
        caller = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", [])]
        if link is None or peer_name(link.neighbour) not in caller:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no link is expected from this peer")
            return
        await context.send_initial_metadata(())
        try:
            await link.run(context)
        except BadMessage as e:  # which the link keeps: the generation reports it
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
