"""How fast one link carries messages over loopback, and what CPU time that takes: two processes, real TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.tls import Identity, new_authority, peer_name
from protomodels_cli.worker.links import Link, dial
from protomodels_cli.worker.listener import Listener

MIB = 1 << 20
SIZES = ((4096, 2000), (MIB, 200), (16 * MIB, 24), (64 * MIB, 6))  # of a message in bytes, and how many each way
WINDOW = 4


def measure_link(sizes: Sequence[tuple[int, int]] = SIZES) -> dict[str, Any]:
    """Messages of each size, both ways at once. Rates count what goes in and what goes out of one of the ends."""
    return {"rows": [_measure(size, count) for size, count in sizes]}


def _measure(size: int, count: int) -> dict[str, Any]:
    authority, spawn = new_authority(), get_context("spawn")
    pipes, processes = [], []
    for name in ("a", "b"):
        ours, theirs = spawn.Pipe()
        who = astuple(authority.issue_with_key(peer_name(name)))
        processes.append(spawn.Process(target=_serve, args=(theirs, name, who, size, count), daemon=True))
        pipes.append(ours)
    for process in processes:
        process.start()
    pipes[0].send(pipes[1].recv())  # b's port
    found = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    gigabytes = 2 * size * count / 1e9
    return {
        "message_bytes": size,
        "gigabytes_per_s": gigabytes / max(seconds for seconds, _, _ in found),
        "cpu_s_per_gigabyte": sum(cpu for _, cpu, _ in found) / 2 / gigabytes,
        "longest_pause_s": max(pause for _, _, pause in found),
    }


def _serve(pipe: Connection, name: str, who: tuple[bytes, bytes, bytes], size: int, count: int) -> None:
    asyncio.run(_End(name, size, count).run(pipe, Identity(*who)))


@dataclass
class _End:
    name: str
    size: int
    count: int
    sent = came = credit = 0
    longest_pause = 0.0

    async def run(self, pipe: Connection, identity: Identity) -> None:
        first = self.name == "a"
        self.done = asyncio.Event()
        self.link = Link(
            1,
            boundary=0,
            neighbour="b" if first else "a",
            to_next=first,
            window=WINDOW,
            credit_every=max(1, WINDOW // 2),
            most_bytes=self.size,
            deliver=self._take,
            has_sent=lambda: None,
            credited=self._send,
        )
        self.message = Message("forward" if first else "backward", 1, 0, 0, b"", bytes(self.size))
        listener = Listener(identity)
        await listener.start("127.0.0.1", 0)
        listener.expect(self.link)
        tasks = [asyncio.create_task(self._watch_pauses())]
        if first:
            port = await asyncio.to_thread(pipe.recv)
            tasks.append(asyncio.create_task(dial(self.link, "127.0.0.1", port, identity)))
        else:
            pipe.send(listener.port)
        await self.link.open.wait()
        began, cpu, self.longest_pause = time.perf_counter(), time.process_time(), 0.0
        self._send(WINDOW)
        await self.done.wait()
        pipe.send((time.perf_counter() - began, time.process_time() - cpu, self.longest_pause))
        await asyncio.to_thread(pipe.recv)  # the other end may still be waiting for what was sent last
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.stop()

    def _send(self, messages: int) -> None:
        self.credit += messages
        while self.credit and self.sent < self.count:
            self.credit -= 1
            self.sent += 1
            self.link.send(self.message)
        self._look()

    def _take(self, message: Message) -> None:
        self.came += 1
        self.link.take()
        self._look()

    def _look(self) -> None:
        if self.sent == self.came == self.count:
            self.done.set()

    async def _watch_pauses(self) -> None:
        """How long the event loop, which heartbeats need too, was busy with something else."""
        while True:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            self.longest_pause = max(self.longest_pause, time.perf_counter() - due)
