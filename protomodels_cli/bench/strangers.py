"""What strangers do to a coordinator's port, for the abuse benchmark and tests: raw TLS and HTTP/2, no gRPC of ours.

Sends what it likes from as many addresses of loopback as it likes. Nothing of a coordinator uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

Address = tuple[str, int]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, WINDOW_UPDATE = 0, 1, 3, 4, 8  # kinds of frames
END_STREAM, END_HEADERS, ACK = 1, 4, 1  # their flags
INITIAL_WINDOW, FRAME_BYTES = 4, 16384  # a setting; the most that a frame may carry by default
ENROL = "/pmtrain.Peering/Enrol"
AGAIN_SECONDS = 0.2  # until a caller that was cut off is back


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str, metadata: Iterable[tuple[str, str]] = ()) -> bytes:
    """Those of a gRPC call, uncompressed: a length in one byte reaches to 126."""
    fields = (
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "coordinator.pmtrain"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *metadata,
    )
    parts = (bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields)
    return b"".join(parts)


def message(body: bytes, announced: int | None = None) -> bytes:
    return struct.pack(">BI", 0, len(body) if announced is None else announced) + body


def loopback_addresses(count: int, first: int = 2) -> list[str]:
    """127.0.0.2 and those after it, all of which are this machine on Linux."""
    return [f"127.0.{n // 250}.{n % 250 + 1}" for n in range(first - 1, first - 1 + count)]


async def tls_to(where: Address, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Trusts whoever answers: a stranger does not mind."""
    return await asyncio.open_connection(*where, ssl=_credulous(), local_addr=(source, 0))


@functools.cache
def _credulous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


class Http2:
    """One connection: keeps to the windows that the server gives, or it would be cut for that."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._initial, self._windows = 65535, Counter[int]()  # of streams; 0: of the connection
        self._windows[0] = 65535
        self._more = asyncio.Event()
        self._next = 1
        self.sent = 0  # bytes of data
        self.answered: set[int] = set()  # calls, with more than a refusal
        self.over = 0  # calls that the server has ended, however
        self.closed = False
        self._write(PREFACE + frame(SETTINGS, 0, 0))
        self.reading = asyncio.create_task(self._read())

    def call(self, path: str, metadata: Iterable[tuple[str, str]] = ()) -> int:
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        self._write(frame(HEADERS, END_HEADERS, stream, headers(path, metadata)))
        return stream

    async def send(self, stream: int, content: bytes, end: bool = False) -> None:
        left = memoryview(content)
        while left and not self.closed:
            room = min(FRAME_BYTES, self._windows[0], self._windows[stream])
            if room <= 0:
                await self._wait_for_more()
                continue
            part, left = left[:room], left[room:]
            self._windows.subtract({0: len(part), stream: len(part)})
            self._write(frame(DATA, END_STREAM if end and not left else 0, stream, bytes(part)))
            with contextlib.suppress(OSError):
                await self._writer.drain()
            self.sent += len(part)

    async def call_and_wait(self, path: str, token: str, request: bytes) -> None:
        """A call with one message, until the server has ended it, however, or closed the connection."""
        before = self.over
        await self.send(self.call(path, [("token", token)]), message(request), end=True)
        while self.over == before and not self.closed:
            await self._wait_for_more()

    async def send_batch(self, batches: Batches, kinds: list[tuple[bytes, bytes]], first: int, calls: int) -> int:
        """Calls at once, and wait until the server has ended all of them: their number, or fewer where it closed."""
        begin, before = self._next, self.over
        self._next += 2 * calls
        content = batches.write(kinds, first, calls, begin)
        while len(content) > self._windows[0] and not self.closed:
            await self._wait_for_more()
        self._windows[0] -= len(content)
        self._write(content)
        while self.over - before < calls and not self.closed:
            await self._wait_for_more()
        return self.over - before

    async def _wait_for_more(self) -> None:
        self._more.clear()
        await self._more.wait()

    async def _read(self) -> None:
        """Until the server closes the connection."""
        try:
            while True:
                head = await self._reader.readexactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                body = await self._reader.readexactly(int.from_bytes(head[:3]))
                if kind == RESET or (kind == HEADERS and flags & END_STREAM):
                    self.over += 1
                if kind == DATA and body:
                    self.answered.add(stream)
                elif kind == WINDOW_UPDATE:
                    self._windows[stream] += struct.unpack(">I", body)[0]
                elif kind == SETTINGS and not flags & ACK:
                    self._set(body)
                    self._write(frame(SETTINGS, ACK, 0))
                self._more.set()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed = True
            self._more.set()

    def _write(self, content: bytes) -> None:
        """Unless there is nobody any more: asyncio would say so every time."""
        if not self.closed and not self._writer.is_closing():
            self._writer.write(content)

    def _set(self, body: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", body):
            if name == INITIAL_WINDOW:
                for stream in list(self._windows)[1:]:
                    self._windows[stream] += value - self._initial
                self._initial = value

    def close(self) -> None:
        self.reading.cancel()
        self._writer.transport.abort()


class Batches:
    """Calls of Enrol with messages that are none, many to a write. As bytes they are made once: what is left to do for
    each is the number of its stream."""

    def __init__(self, token: str, draw: random.Random):
        known, unknown = headers(ENROL, [("token", token)]), headers(ENROL)
        self.known = [(known, _nonsense(draw)) for _ in range(64)]
        self.small = [(unknown, message(draw.randbytes(20))) for _ in range(64)]

    def write(self, kinds: list[tuple[bytes, bytes]], first: int, calls: int, begin: int) -> bytes:
        """So many calls, on the streams from `begin` on."""
        parts = []
        for i in range(calls):
            head, body = kinds[(first + i) % len(kinds)]
            stream = begin + 2 * i
            parts.append(frame(HEADERS, END_HEADERS, stream, head))
            for at in range(0, len(body), FRAME_BYTES):
                last = at + FRAME_BYTES >= len(body)
                parts.append(frame(DATA, END_STREAM if last else 0, stream, body[at : at + FRAME_BYTES]))
        return b"".join(parts)


def _nonsense(draw: random.Random) -> bytes:
    """Oversized, cut off or random."""
    match draw.randrange(8):
        case 0:
            return message(draw.randbytes(17_000))  # a message of Enrol has 16 KiB at most
        case 1 | 2 | 3:
            return message(draw.randbytes(100), announced=300)
        case _:
            return message(draw.randbytes(draw.choice((20, 300))))


async def half_sent(where: Address, source: str, streams: int, size: int, announced: int) -> Http2:
    """A connection with so many calls of Enrol, each of which announces a message and sends `size` bytes of it."""
    connection = Http2(*await tls_to(where, source))
    begun = [connection.call(ENROL) for _ in range(streams)]
    part = message(bytes(size - 5), announced)
    sending = [asyncio.create_task(connection.send(stream, part)) for stream in begun]
    both = asyncio.gather(*sending)
    await asyncio.wait([both], timeout=5)
    both.cancel()
    await asyncio.gather(both, return_exceptions=True)
    return connection


async def enrolments(where: Address, source: str, token: str, request: bytes, count: int, quiet: float = 0.5) -> int:
    """As many as the coordinator lets through, of so many, one after another. `quiet`: seconds without another answer
    after which none is waited for."""
    connection = Http2(*await tls_to(where, source))
    for _ in range(count):
        await connection.send(connection.call(ENROL, [("token", token)]), message(request), end=True)
        if connection.closed:
            break
    answered = -1
    while answered < len(connection.answered):
        answered = len(connection.answered)
        await asyncio.sleep(quiet)
    connection.close()
    return len(connection.answered)


async def hold_calls(
    where: Address, token: str, request: bytes, silent: int, enrolling: int, done: Counter[str] | None = None
) -> None:
    """Until it is cancelled, from the address at which the coordinator is: connections with as many silent calls as
    they may have, and others over which one caller enrols again and again, for as long as it is let."""
    count = Counter[str]() if done is None else done

    async def be_silent() -> None:
        connection = Http2(*await tls_to(where, where[0]))
        for _ in range(16):
            connection.call(ENROL, [("token", token)])
        count["silent connections"] += 1
        try:
            await connection.reading
        finally:
            connection.close()

    async def enrol() -> None:
        connection = Http2(*await tls_to(where, where[0]))
        try:
            while not connection.closed:
                await connection.call_and_wait(ENROL, token, request)
                count["enrolments"] += 1
        finally:
            connection.close()

    async def again(attack: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                await attack()
            await asyncio.sleep(AGAIN_SECONDS)

    await asyncio.gather(*(again(be_silent) for _ in range(silent)), *(again(enrol) for _ in range(enrolling)))
