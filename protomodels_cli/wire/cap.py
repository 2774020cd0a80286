"""A cap on all that one peer sends and receives: the bytes of every connection pass one clock for each way.

gRPC opens its connections by itself, so it is led to ports on loopback, and this process carries the bytes between them
and the network. TLS's bytes are counted, and those of Ethernet, IP and TCP are added. Bytes wait here before they
leave; what comes in is read no faster than the cap, so that TCP slows the sender. It must not know what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import sys
from asyncio import StreamReader, StreamWriter

from protomodels_cli.cost.line import HEADERS, SEGMENT, Line
from protomodels_cli.errors import OptionError
from protomodels_cli.quantities import rate
from protomodels_cli.spec.units import bits_per_second
from protomodels_cli.wire.join_link import Address
from protomodels_cli.wire.splice import LINGER_SECONDS, Stream, hang_up, splice, tune

# A link is given up after timeouts.LINK_SILENT without a frame, and a stage has two links that send at the same time.
LEAST = 1e6  # bits a second
AHEAD = 0.1  # seconds of a cap that may leave at once: a busy machine wakes late, which must cost no bandwidth
TURN = 0.005  # seconds that one connection has the line to itself while others wait
BUFFER = 1 << 16  # bytes that wait in the system for their turn
TRIP = 0.25  # seconds of a capped downlink that may be on their way to this machine
MOST_INCOMING = 128
CONNECT_SECONDS = 10.0
# linux/tcp.h: where tcp_info has the packets that were sent again, and those sent and received.
TCP_INFO_BYTES, SENT_AGAIN, SEGMENTS = 144, 100, 136


def parse_cap(option: str, text: str | None) -> float | None:
    """Bits a second. Raises OptionError with the option's name."""
    if text is None:
        return None
    try:
        bits = bits_per_second(text)
    except ValueError as e:
        raise OptionError(f"--{option} {text}: {e}", f"write for example --{option} 10mbit", option) from None
    if bits < LEAST:
        raise OptionError(
            f"--{option} {text}: must be at least {rate(LEAST, 'bit/s')}; below that, activations hold up the signs of "
            "life between neighbours for so long that their link is given up",
            f"write --{option} {LEAST / 1e6:g}mbit or more; the rest of your line stays free",
            option,
        )
    return bits


class Cap:
    """`upload`, `download`: bits a second; None: as much as the line carries. Closes with its `async with`."""

    def __init__(self, upload: float | None, download: float | None):
        self.upload, self.download = upload, download
        self._up, self._down = Line(upload or math.inf), Line(download or math.inf)
        self._ways: dict[tuple[Address, bool], Address] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cap:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (tasks := [*self._serving]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def way_to(self, target: Address, first: bool = False) -> Address:
        """A port on this machine whose every connection leads to `target` under the cap. `first`: these bytes count,
        and wait for nothing. That is for heartbeats and what else is small and urgent."""
        if (target, first) not in self._ways:
            listening = socket.create_server(("127.0.0.1", 0))
            self._ways[target, first] = listening.getsockname()
            self._serve(listening, target, first, inwards=False)
        return self._ways[target, first]

    def let_in(self, listening: socket.socket, target: Address) -> None:
        """Lead what comes in there to a port of this machine, under the cap."""
        self._serve(listening, target, first=False, inwards=True)

    async def carry(self, local: Stream, remote: Stream, first: bool = False) -> None:
        """As `splice`, for a connection within this machine and one that leaves it."""
        if self.download is not None:
            room = max(BUFFER, int(self.download / 8 * TRIP))
            with contextlib.suppress(OSError):  # it may be gone already
                remote[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        packets = _Packets(remote[1], self._up, self._down)
        out = asyncio.ensure_future(_pass_on(local[0], remote[1], self._up, packets, first))
        back = asyncio.ensure_future(_pass_on(remote[0], local[1], self._down, packets, first))
        try:
            done, going_on = await asyncio.wait({out, back}, return_when=asyncio.FIRST_COMPLETED)
            if not any(way.exception() for way in done):
                await asyncio.wait(going_on, timeout=LINGER_SECONDS)
                await asyncio.gather(hang_up(local[1]), hang_up(remote[1]))
        finally:
            for way in (out, back):
                way.cancel()
            await asyncio.gather(out, back, return_exceptions=True)
            for _, writer in (local, remote):
                writer.transport.abort()

    async def sent(self, size: int) -> None:
        """Wait until so many bytes, of a connection that does not pass here, may have left."""
        await self._reckoned(self._up, self._down, size)

    async def received(self, size: int) -> None:
        await self._reckoned(self._down, self._up, size)

    async def _reckoned(self, line: Line, answers: Line, size: int) -> None:
        """With as many packets as there should be, and a confirmation for every other one."""
        packets, now = math.ceil(size / SEGMENT), asyncio.get_running_loop().time()
        answers.leave(now, HEADERS * packets / 2)
        await _until_left(line, size + HEADERS * packets)

    @property
    def piece(self) -> int:
        """Bytes to send or to receive at once on such a connection."""
        return min(_turn(self._up), _turn(self._down))

    def _serve(self, listening: socket.socket, target: Address, first: bool, inwards: bool) -> None:
        if not inwards:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # what is sent waits before us, not here
        serving = asyncio.create_task(self._keep_serving(listening, target, first, inwards))
        self._serving.add(serving)

    async def _keep_serving(self, listening: socket.socket, target: Address, first: bool, inwards: bool) -> None:
        passing: set[asyncio.Task[None]] = set()

        def come_in(reader: StreamReader, writer: StreamWriter) -> None:
            if len(passing) >= MOST_INCOMING:
                writer.transport.abort()
                return
            passing.add(task := asyncio.create_task(self._lead((reader, writer), target, first, inwards)))
            task.add_done_callback(passing.discard)

        server = await asyncio.start_server(come_in, sock=listening, limit=BUFFER // 2)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in (tasks := [*passing]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _lead(self, came: Stream, target: Address, first: bool, inwards: bool) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                led = await asyncio.open_connection(*target, limit=BUFFER // 2)
        except OSError:  # TimeoutError is one; gRPC sees its connection end, and tries again
            came[1].transport.abort()
            return
        for _, writer in (came, led):
            tune(writer)
        local, remote = (led, came) if inwards else (came, led)
        await self.carry(local, remote, first)


async def carry_under(cap: Cap | None, local: Stream, remote: Stream) -> None:
    """Under the cap, where there is one."""
    await (splice(local, remote) if cap is None else cap.carry(local, remote))


def _turn(line: Line) -> int:
    return BUFFER if math.isinf(line.rate) else max(1, min(BUFFER, int(line.rate / 8 * TURN)) // SEGMENT) * SEGMENT


async def _until_left(line: Line, size: float) -> None:
    now = asyncio.get_running_loop().time()
    if (wait := line.leave(now, size) - AHEAD - now) > 0:
        await asyncio.sleep(wait)


class _Packets:
    """Counts what one connection's packets take of both lines beyond the bytes that they carry. Linux says how many
    there were, confirmations among them, and how many were sent again; elsewhere there are as many as should be."""

    def __init__(self, writer: StreamWriter, up: Line, down: Line):
        self._socket, self.up, self._down = writer.get_extra_info("socket"), up, down
        self._sent = self._received = self._again = 0

    def count(self, size: int, is_sent: bool) -> None:
        """Called with every few bytes that pass."""
        now = asyncio.get_running_loop().time()
        if sys.platform != "linux":
            packets = math.ceil(size / SEGMENT)
            self._charge(now, *((packets, packets / 2) if is_sent else (packets / 2, packets)), 0)
            return
        with contextlib.suppress(OSError):  # it is gone
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            [again] = struct.unpack_from("I", info, SENT_AGAIN)
            sent, received = struct.unpack_from("II", info, SEGMENTS)
            self._charge(now, sent - self._sent, received - self._received, again - self._again)
            self._sent, self._received, self._again = sent, received, again

    def _charge(self, now: float, sent: float, received: float, again: float) -> None:
        self.up.leave(now, HEADERS * sent + SEGMENT * again)
        self._down.leave(now, HEADERS * received)


async def _pass_on(reader: StreamReader, writer: StreamWriter, line: Line, packets: _Packets, first: bool) -> None:
    """Returns at the end of what comes, which is passed on. `first`: it counts, and does not wait."""
    is_sent = line is packets.up
    while chunk := await reader.read(_turn(line)):
        packets.count(len(chunk), is_sent)
        if first:
            line.leave(asyncio.get_running_loop().time(), len(chunk))
        else:
            await _until_left(line, len(chunk))
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
