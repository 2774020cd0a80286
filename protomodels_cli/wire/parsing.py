"""Requests that are no messages, answered as what they are. gRPC itself answers that the server failed, and has it
write a traceback for each: whoever sends nonsense would fill the log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_NONSENSE = object()


class RefuseNonsense(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = _parsing(handler.request_deserializer)
        kinds = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        name, make = kinds[handler.request_streaming, handler.response_streaming]
        work = getattr(handler, name)
        wrap = (_streaming if handler.response_streaming else _answering)(work, handler.request_streaming)
        return make(wrap, parse, handler.response_serializer)


def _parsing(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def or_not(content: bytes) -> Any:
        try:
            return parse(content)
        except (DecodeError, ValueError):
            return _NONSENSE

    return or_not


class _Requests:
    """The messages of a stream, which ends with the first that is none."""

    def __init__(self, requests: AsyncIterator[Any]):
        self._requests, self.ended_in_nonsense = requests, False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self.ended_in_nonsense:
            raise StopAsyncIteration
        request = await anext(self._requests)
        if request is _NONSENSE:
            self.ended_in_nonsense = True
            raise StopAsyncIteration
        return request


async def _refuse(context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what arrived is no message of this call")


def _answering(work: Callable[..., Awaitable[Any]], streams: bool) -> Callable[..., Awaitable[Any]]:
    async def answer(requests: Any, context: grpc.aio.ServicerContext) -> Any:
        if requests is _NONSENSE:
            await _refuse(context)
        requests = _Requests(aiter(requests)) if streams else requests
        reply = await work(requests, context)
        if streams and requests.ended_in_nonsense:
            await _refuse(context)
        return reply

    return answer


def _streaming(work: Callable[..., Any], streams: bool) -> Callable[..., Any]:
    async def stream(requests: Any, context: grpc.aio.ServicerContext) -> None:
        """Answers that the call yields, or writes itself."""
        if requests is _NONSENSE:
            await _refuse(context)
        requests = _Requests(aiter(requests)) if streams else requests
        found = work(requests, context)
        if hasattr(found, "__aiter__"):
            async for reply in found:
                await context.write(reply)
        else:
            await found
        if streams and requests.ended_in_nonsense:
            await _refuse(context)

    return stream
