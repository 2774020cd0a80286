"""Every call of a coordinator passes here first: who may make it, how large its messages are, how long it may wait.

A caller shows what it has in the call's metadata, so that nothing of a stranger's message is looked at. The table below
is all there is of rights; a test holds it against the protocol's own list of calls, and every call against everybody
who must not make it. Knows gRPC; who a caller is, `Guard` says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import grpc
from google.protobuf.message import DecodeError

from protomodels_cli.coordinator import calls, refusals
from protomodels_cli.coordinator.bad_requests import NotAMessage
from protomodels_cli.coordinator.call_queue import Changes, Turns
from protomodels_cli.coordinator.notices import Unwanted
from protomodels_cli.wire.channels import PIECE

FIRST_SECONDS, STRANGER_SECONDS = 30.0, 1.0  # for the first message of a call
TURN_SECONDS = 20.0  # that a call may wait for its turn: less than any caller of ours waits for the answer
MOST_CALLS = 16  # of one peer, or of one network's others, that are served at a time; others wait for their turn
MOST_SILENT, MOST_WAITING = 64, 64  # of the same, without a message yet, and for their turn
KIB = 1 << 10


@dataclass(frozen=True)
class Right:
    shows: Literal["token", "peer", "owner", "any"]  # any: a token, or what a peer or the owner shows
    most_bytes: int  # of a message


RIGHTS = {
    "/pmtrain.Peering/Enrol": Right("token", 16 * KIB),
    "/pmtrain.Peering/Renew": Right("peer", 16 * KIB),
    "/pmtrain.Peering/CheckReachability": Right("peer", KIB),
    "/pmtrain.Peering/Session": Right("peer", PIECE),
    "/pmtrain.Peering/Offer": Right("peer", 64 * KIB),
    "/pmtrain.Peering/Upload": Right("peer", PIECE + KIB),
    "/pmtrain.Peering/Fetch": Right("peer", KIB),
    "/pmtrain.Peering/Locate": Right("peer", KIB),
    "/pmtrain.Peering/Measure": Right("peer", PIECE + KIB),
    "/pmtrain.Operator/Status": Right("any", KIB),
    "/pmtrain.Operator/Control": Right("owner", KIB),
    "/pmtrain.Operator/CreateToken": Right("owner", KIB),
    "/pmtrain.Operator/ListTokens": Right("owner", KIB),
    "/pmtrain.Operator/RevokeToken": Right("owner", KIB),
    "/pmtrain.Operator/Kick": Right("owner", KIB),
    "/pmtrain.Operator/Rest": Right("owner", KIB),
}
GATE_OPTIONS = [  # of gRPC, beside those of all servers: strangers come here
    ("grpc.max_connection_idle_ms", 60_000),  # without a call
    ("grpc.max_concurrent_streams", MOST_CALLS),
    ("grpc.max_metadata_size", 8 * KIB),
    ("grpc.max_receive_message_length", max(right.most_bytes for right in RIGHTS.values())),
]


@dataclass(frozen=True)
class Caller:
    name: str  # calls of the same are counted together
    connection: int  # a newer one has a higher number


@dataclass
class _Call:
    clock: asyncio.Timeout | None = None  # of its waiting
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    late: bool = False
    dropped: bool = False  # to make room

    @asynccontextmanager
    async def waits(self, seconds: float) -> AsyncIterator[None]:
        """For so long at most, or until it is dropped, which ends the wait without an exception."""
        try:
            async with asyncio.timeout(0 if self.dropped else seconds) as self.clock:
                yield
        except TimeoutError:
            self.late = not self.dropped
        finally:
            self.clock = None

    def drop(self) -> None:
        self.dropped = True
        if self.clock is not None and not self.clock.expired():
            self.clock.reschedule(0.0)


class Guard(Protocol):
    """Says who is calling."""

    def refusal(self, right: Right, context: grpc.aio.ServicerContext) -> refusals.Refusal | None: ...

    def believe(self, right: Right, context: grpc.aio.ServicerContext) -> Caller:
        """The caller has this right."""

    def failed(self, context: grpc.aio.ServicerContext) -> None:
        """A call with a token was refused or rejected."""

    def turned_away(self, context: grpc.aio.ServicerContext, what: Unwanted) -> None:
        """A call was refused that an honest peer seldom makes."""


class Gate(grpc.aio.ServerInterceptor):
    def __init__(self, guard: Guard):
        self._guard = guard
        self._turns = Turns(MOST_CALLS, MOST_SILENT, MOST_WAITING)
        self._calls: dict[int, _Call] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        right = RIGHTS.get(handler_call_details.method)
        return None if handler is None or right is None else self._guarded(handler, right)

    def _guarded(self, handler: Any, right: Right) -> grpc.RpcMethodHandler:
        """The call with its messages read here: as bytes, and in time."""
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        @asynccontextmanager
        async def admitted(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            """What the call is served with. A stream ends with what is no message, and is refused when it was served:
            not from within, where somebody else may be writing."""
            async with self._admitted(right, messages, context) as first:
                sent = _Sent(first, messages, handler.request_deserializer, right.most_bytes)
                request = sent.all() if handler.request_streaming else sent.parsed(first or b"")
                try:
                    if sent.wrong is None:
                        yield request
                    if sent.wrong is not None:
                        await calls.reject(context, sent.wrong)
                except grpc.aio.AbortError:
                    if right.shows in (
                        "token",
                        "any",
                    ):  # which many may have; of a peer one knows more, and can dismiss it
                        self._guard.failed(context)
                    raise

        async def answer(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with admitted(messages, context) as request:
                return await serve(request, context)

        async def stream(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with admitted(messages, context) as request:
                said = serve(request, context)
                if not hasattr(said, "aclose"):  # it writes by itself
                    await said
                    return
                async with contextlib.aclosing(said):
                    async for message in said:
                        yield message

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @asynccontextmanager
    async def _admitted(
        self, right: Right, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes | None]:
        """For as long as the call lasts, with its first message; None: it has none."""
        if (refusal := self._guard.refusal(right, context)) is not None:
            # Read the first message before a refusal: a caller that still writes may see a failed write instead.
            with contextlib.suppress(TimeoutError):
                await _first(messages, STRANGER_SECONDS)
            await calls.refuse(context, refusal)
        async with self._turn(self._guard.believe(right, context), right.most_bytes, messages, context) as first:
            yield first

    @asynccontextmanager
    async def _turn(
        self, caller: Caller, most_bytes: int, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes | None]:
        """Wait for the call's first message, then for its turn. What is too large for a message need not wait: it is
        rejected, and must not be kept for so long."""
        number, changes = self._turns.come(caller.name, caller.connection)
        call, first = _Call(), None
        self._calls[number] = call
        self._apply(changes)
        try:
            async with call.waits(FIRST_SECONDS):
                first = await anext(aiter(messages), None)
            if call.late:
                why = f"no message came within {FIRST_SECONDS:g} s"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
            if len(first or b"") <= most_bytes:
                self._apply(self._turns.said(number))
                async with call.waits(TURN_SECONDS):
                    await call.turn.wait()
                if call.late or call.dropped:
                    self._guard.turned_away(context, "too_many_calls")
                    await calls.refuse(context, refusals.TooManyCalls())
            yield first
        finally:
            del self._calls[number]
            self._apply(self._turns.end(number))

    def _apply(self, changes: Changes) -> None:
        for number in changes.served:
            self._calls[number].turn.set()
        for number in changes.dropped:
            self._calls[number].drop()


async def _first(messages: AsyncIterator[bytes], seconds: float) -> bytes | None:
    async with asyncio.timeout(seconds):
        return await anext(aiter(messages), None)


class _Sent:
    """What a caller sends, up to what is no message of the call: that is `wrong`."""

    def __init__(self, first: bytes | None, rest: AsyncIterator[bytes], parse: Callable[[bytes], Any], most: int):
        self._first, self._rest, self._parse, self._most = first, rest, parse, most
        self.wrong: NotAMessage | None = None

    def parsed(self, content: bytes) -> Any:
        try:
            if len(content) <= self._most:
                return self._parse(content)
        except DecodeError:
            pass
        self.wrong = NotAMessage(len(content), self._most)
        return None

    async def all(self) -> AsyncIterator[Any]:
        content = self._first
        while content is not None:
            message = self.parsed(content)
            if self.wrong is not None:
                return
            yield message
            content = await anext(aiter(self._rest), None)
