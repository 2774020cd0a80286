"""The control stream: connects to the coordinator, registers, sends heartbeats, and reconnects when it breaks.

Knows that messages have numbers, not what they mean. It must not know stages, links, the engine or snapshots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from protomodels_cli.retry import Backoff
from protomodels_cli.wire.channels import HEARTBEATS
from protomodels_cli.wire.client import Line, Metadata, Refused, in_words, was_closed, why_failed
from protomodels_cli.wire.join_link import UnreachableError
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker import problems
from protomodels_cli.worker.telling import PeerError

RECONNECT = 0.2, 2.0  # seconds between tries to reach the coordinator: at first, at most
SILENT_LEASES = 1.5  # without a word from the coordinator, who says one every two fifths of a lease: it is gone

MOST_DETAIL = 120  # characters of what gRPC says of a failure


class Lost(Exception):
    """The connection to the coordinator is gone, or of no use any more."""

    def __init__(self, reason: problems.Loss):
        super().__init__(reason.kind)
        self.reason = reason


class ConnectFailed(PeerError, UnreachableError):
    """The first connection failed: whoever called may begin again from the enrolment."""


class ControlStream:
    """One peer's side of the stream over which the coordinator leads it, through any number of connections.

    `over` is done when the session is. Before the first answer a failure is raised; after it, it is waited out."""

    def __init__(
        self,
        line: Line,
        metadata: Metadata,
        lease_seconds: float,
        give_up_after: float,
        over: asyncio.Future[int],
        lost: Callable[[problems.Loss], None],
    ):
        self._line, self._metadata, self._lease, self._over = line, metadata, lease_seconds, over
        self._lost = lost  # is told why, once for every time the coordinator is lost
        self._backoff = Backoff(*RECONNECT, give_up_after=give_up_after)
        self._outbox: asyncio.Queue[pb.PeerMessage | None] = asyncio.Queue()  # None: the end
        self._heard = 0  # the number of the coordinator's last message
        self._leaving = False
        self.connected = False  # the coordinator has answered on this connection
        self._patience: asyncio.Timeout | None = None  # with the coordinator's next word
        self._moved = False

    def send(self, **body: Any) -> None:
        self._outbox.put_nowait(pb.PeerMessage(**body))

    def end(self) -> None:
        """The coordinator hears all that was sent before, and hangs up."""
        self._outbox.put_nowait(None)

    def reconnect(self) -> None:
        """This machine is in another network: what is connected is dead, whatever the system believes."""
        self._line.renew()
        if self.connected and self._patience is not None and not self._patience.expired():
            self._moved = True
            self._patience.reschedule(asyncio.get_running_loop().time())

    def ask_to_leave(self) -> bool:
        """Ask the coordinator to let this peer go, now and on every later connection. Returns whether there is a
        connection; without one, this peer soon gives up, since somebody waits for it to end."""
        self._leaving = True
        self._backoff.give_up_after = min(self._backoff.give_up_after, SILENT_LEASES * self._lease)
        if self.connected:
            self.send(leaving=pb.Leaving())
        return self.connected

    async def run(
        self,
        introduce: Callable[[], Awaitable[list[pb.PeerMessage]]],
        obey: Callable[[pb.CoordinatorMessage], Awaitable[None]],
    ) -> None:
        """Stay connected until the session is over, or until the coordinator is gone and this peer asked to leave."""
        been_in = False
        reason: problems.Loss = problems.ConnectionClosed()
        while not self._over.done():
            self._heard = 0
            try:
                await self._converse(await introduce(), obey)
            except (Lost, grpc.aio.AioRpcError) as e:
                if isinstance(e, grpc.aio.AioRpcError) and isinstance(refused := in_words(e), Refused):
                    raise refused from None
                reason = e.reason if isinstance(e, Lost) else _failure(e)
                if not been_in and not self._heard:
                    raise ConnectFailed(problems.NeverConnected(reason)) from None
            if self._over.done():
                return
            if self._heard:
                been_in = True
                self._backoff.reset()
            else:
                self._line.look_elsewhere()
            wait = self._backoff.after_failure(time.monotonic())
            if wait is None:
                if self._leaving:
                    return
                raise PeerError(problems.GaveUp(self._backoff.give_up_after))
            if self._backoff.failures == 1:
                self._lost(reason)
            await asyncio.sleep(wait)

    async def _converse(
        self, introduction: list[pb.PeerMessage], obey: Callable[[pb.CoordinatorMessage], Awaitable[None]]
    ) -> None:
        """Hold one connection, from the registration to its end."""
        self._outbox = asyncio.Queue()  # what was said to nobody has no meaning now, but for what is said again
        for message in introduction:
            self._outbox.put_nowait(message)
        if self._leaving:
            self.send(leaving=pb.Leaving())
        call = self._line.Session(self._outgoing(self._outbox), metadata=self._metadata)
        beating = asyncio.create_task(self._beat(self._outbox))
        try:
            while not self._over.done():
                message = await self._read(call)
                self.connected = True
                if not self._is_next(message):
                    continue
                if message.WhichOneof("body") == "addresses":
                    self._line.add(message.addresses.hosts)
                else:
                    await obey(message)
        except grpc.aio.AioRpcError as e:
            error = in_words(e)
            raise error if isinstance(error, Refused) else Lost(_failure(e)) from None
        finally:
            self.connected = False
            beating.cancel()
            call.cancel()

    async def _read(self, call: Any) -> pb.CoordinatorMessage:
        try:
            async with asyncio.timeout(SILENT_LEASES * self._lease) as self._patience:
                message = await call.read()
        except TimeoutError:
            moved, self._moved = self._moved, False
            self._line.renew()  # or the next call goes over the same connection, which may be as good as dead
            silent = problems.NoHeartbeat(SILENT_LEASES * self._lease)
            raise Lost(problems.AddressChanged() if moved else silent) from None
        if message is grpc.aio.EOF:
            raise Lost(problems.ConnectionClosed())
        return message

    def _is_next(self, message: pb.CoordinatorMessage) -> bool:
        """Whether the message is new. Raises Lost for a gap in the numbers, which a heartbeat shows at the latest."""
        is_beat = message.WhichOneof("body") == "heartbeat"
        if message.number > self._heard + (not is_beat):
            raise Lost(problems.MessageMissing(self._heard + 1))
        if is_beat or message.number <= self._heard:
            return False
        self._heard = message.number
        return True

    async def _beat(self, outbox: asyncio.Queue[pb.PeerMessage | None]) -> None:
        while True:
            await asyncio.sleep(self._lease / HEARTBEATS)
            outbox.put_nowait(pb.PeerMessage(heartbeat=pb.Heartbeat()))

    async def _outgoing(self, outbox: asyncio.Queue[pb.PeerMessage | None]) -> AsyncIterator[pb.PeerMessage]:
        while (message := await outbox.get()) is not None:
            yield message


def _failure(error: grpc.aio.AioRpcError) -> problems.Loss:
    detail = "" if was_closed(error) else why_failed(error)[:MOST_DETAIL]
    return problems.NetworkFailed(detail) if detail else problems.ConnectionClosed()
