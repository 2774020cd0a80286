"""The one process that the packets of all emulated hosts go through, and that takes the hosts down at the end.

Knows IP packets, lines and clocks; `hosts.py` starts it. It must not import anything heavy: it shares the machine with
the programs that are measured.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count

from protomodels_cli.launch.system_tools import system_tool

VNET_HEADER = 10  # struct virtio_net_hdr, before every packet: says how the kernel would have cut it for the wire
ETHERNET_HEADER = 14
NETWORK = bytes((198, 18, 0))
QUEUE_BYTES, QUEUE_SECONDS = 256 * 1024, 0.1  # what waits before a line, at most: a cable modem keeps about as much
READS = 64  # packets taken from one host before the others' turn
# With more packets than BUSY on their way, it rests between rounds and moves what came or fell due in one go: waking up
# is most of its cost. Clocks are virtual, so no rate suffers.
BUSY, NAP_SECONDS = 8, 0.0005
BIGGEST = VNET_HEADER + 65535


def wire_bytes(packet: bytes) -> int:
    """The size on the wire of what the kernel handed over: a long TCP segment costs the headers of all its parts."""
    length = len(packet) - VNET_HEADER
    kind, part, tcp = struct.unpack_from("=xB2xHH", packet)
    if not kind:
        return length + ETHERNET_HEADER
    headers = tcp + (packet[VNET_HEADER + tcp + 12] >> 4) * 4
    payload = length - headers
    return int(payload + -(-payload // part) * (headers + ETHERNET_HEADER))


class Router:
    """Forwards between hosts. Each has one line with a clock each way: the time at which it will have sent all it has.

    A packet passes its sender's uplink, then the latency, then its receiver's downlink, where it meets what others
    sent. The heap holds packets on their way, by the time at which the next thing happens to them.
    """

    def __init__(self, fds: Sequence[int], bits_per_second: float, latency: float, jitter: float, loss: float):
        self.fds, self.latency, self.jitter, self.loss = list(fds), latency, jitter, loss
        self.seconds_per_byte = 8 / bits_per_second
        self.queue = max(QUEUE_BYTES * self.seconds_per_byte, QUEUE_SECONDS)
        self.up, self.down = ([0.0] * len(self.fds) for _ in range(2))
        self.last: dict[tuple[int, int], float] = {}  # when the newest packet of a pair of hosts arrives
        self.heap: list[tuple[float, int, int, int, bytes]] = []  # due, number, receiver, bytes (0: all done), packet
        self.number, self.random = count(), random.Random(0)
        self.moved = [{"up": 0, "down": 0, "dropped": 0, "lost": 0} for _ in self.fds]

    def take(self, source: int, packet: bytes, now: float) -> None:
        """Through the uplink and on its way, unless the queue is full or the packet is lost."""
        if len(packet) < VNET_HEADER + 20 or packet[VNET_HEADER] >> 4 != 4:
            return
        target = packet[VNET_HEADER + 19] - 1
        if packet[VNET_HEADER + 16 : VNET_HEADER + 19] != NETWORK or not 0 <= target < len(self.fds):
            return  # a broadcast, or somewhere that does not exist here
        size = wire_bytes(packet)
        if self.up[source] - now > self.queue:
            self.moved[source]["dropped"] += 1
            return
        self.up[source] = sent = max(now, self.up[source]) + size * self.seconds_per_byte
        self.moved[source]["up"] += size
        if self.loss and self.random.random() < self.loss:
            self.moved[source]["lost"] += 1
            return
        way = self.jitter and self.random.uniform(-self.jitter, self.jitter)
        arrival = max(sent + max(0.0, self.latency + way), self.last.get((source, target), 0.0))
        self.last[source, target] = arrival
        heapq.heappush(self.heap, (arrival, next(self.number), target, size, packet))

    def give(self, now: float) -> None:
        """Deliver what is due. A downlink that nobody else uses adds nothing: it receives while the uplink sends."""
        while self.heap and self.heap[0][0] <= now:
            due, _, target, size, packet = heapq.heappop(self.heap)
            if size:
                if self.down[target] - due > self.queue:
                    self.moved[target]["dropped"] += 1
                    continue
                self.moved[target]["down"] += size
                self.down[target] = end = max(due, self.down[target] + size * self.seconds_per_byte)
                if end > now:
                    heapq.heappush(self.heap, (end, next(self.number), target, 0, packet))
                    continue
            try:
                os.write(self.fds[target], packet)
            except OSError:  # the kernel's own queue is full
                self.moved[target]["dropped"] += 1

    def run(self, owner: int) -> None:
        """Until the owner hangs up. A line from it is answered with what was moved so far."""
        hosts = {fd: i for i, fd in enumerate(self.fds)}
        waiting = [owner, *self.fds]
        while True:
            if len(self.heap) > BUSY:
                time.sleep(NAP_SECONDS)
            pause = max(0.0, self.heap[0][0] - time.monotonic()) if self.heap else None
            ready = select.select(waiting, [], [], pause)[0]  # poll and epoll count in whole milliseconds
            now = time.monotonic()
            for fd in ready:
                if fd == owner:
                    if not os.read(owner, 1024):
                        return
                    print(json.dumps({"cpu_s": time.process_time(), "hosts": self.moved}), flush=True)
                    continue
                with contextlib.suppress(BlockingIOError):
                    for _ in range(READS):
                        self.take(hosts[fd], os.read(fd, BIGGEST), now)
            self.give(now)


def remove(names: Sequence[str]) -> None:
    """End what runs in these network namespaces and delete them. Those that are gone already are no error."""
    ours = {line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()} & set(names)
    for name in ours:
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in ours:
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    return subprocess.run([system_tool("ip"), *arguments], capture_output=True, text=True).stdout


def main() -> None:
    order = json.loads(sys.argv[1])
    with contextlib.suppress(OSError):  # late packets would look like a slow link where all cores are busy
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing here makes cycles
    router = Router(order["fds"], order["bits_per_second"], order["latency"], order["jitter"], order["loss"])
    try:
        router.run(owner=0)
    finally:
        for fd in router.fds:
            os.close(fd)
        remove(order["names"])  # also where the owner was killed and could not


if __name__ == "__main__":
    main()
