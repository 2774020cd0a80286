"""One process of a swarm: many light peers on one event loop, some of which leave and are replaced.

    python -m protomodels_cli.bench.swarm_process

Is told what to do by lines on its standard input (an `Order` in JSON, `churn`, the input's end), and answers with lines
on its standard output: `ready` once all have joined, and at the end, in JSON, what they have seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protomodels_cli.bench.light_peer import LightPeer, Seen, Work, persist
from protomodels_cli.errors import UserError
from protomodels_cli.wire.client import operator
from protomodels_cli.wire.join_link import JoinLink

FILES_EACH, FILES_FOR_OTHERS = 4, 256
NICENESS = 5  # of at most 19
CHURN, READY = "churn", "ready"


@dataclass(frozen=True)
class Order:
    """What one process is to do."""

    link: str
    lease_seconds: float
    step_seconds: float
    tokens: int
    number: int  # of this process
    clients: int
    joins_per_s: float
    leaves_per_s: float
    watch: bool  # ask for the status every second, as `pmtrain status --watch` does
    makes_way: bool  # for the coordinator, and for the peers that hold the stages


class Swarm:
    def __init__(self, order: Order):
        self._order, self.seen, self._names = order, Seen(), 0
        self._work = Work(JoinLink.parse(order.link), order.lease_seconds, order.step_seconds, order.tokens)
        self._here: dict[LightPeer, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self.leaves = {"asked": 0, "vanished": 0}
        self.statuses: list[float] = []

    async def fill(self) -> None:
        """One after another, at the rate that was ordered, whether or not the one before is in."""
        for _ in range(self._order.clients):
            self._add()
            await asyncio.sleep(1 / self._order.joins_per_s)
        while len(self.seen.joins) < self._order.clients:
            await asyncio.sleep(0.05)

    def _add(self) -> None:
        self._names += 1
        peer = LightPeer(f"light-{self._order.number}-{self._names}", self._work, self.seen)
        self._here[peer] = asyncio.create_task(persist(peer, self.seen))

    async def churn(self) -> None:
        """Those that hold a stage vanish, as homes do; others ask to leave. Somebody else joins for each."""
        while True:
            await asyncio.sleep(random.expovariate(self._order.leaves_per_s))
            peer = random.choice(list(self._here))
            if peer.holds_a_stage:
                self.leaves["vanished"] += 1
                self._here.pop(peer).cancel()
            else:
                self.leaves["asked"] += 1
                peer.ask_to_leave()
                self._leaving.add(task := self._here.pop(peer))
                task.add_done_callback(self._leaving.discard)
            self._add()

    async def watch(self) -> None:
        async with operator(self._work.link) as asking:
            while True:
                began = time.monotonic()
                try:
                    await asking.status()
                except UserError as e:
                    self.seen.failed[f"status_{e.kind}"] += 1
                self.statuses.append(time.monotonic() - began)
                await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - began)))

    async def end(self) -> None:
        tasks = [*self._here.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def result(self) -> dict[str, Any]:
        return {
            "joins": self.seen.joins,
            "commits": [[*key, *asdict(commit).values()] for key, commit in self.seen.commits.items()],
            "lost": self.seen.lost,
            "failed": self.seen.failed,
            "leaves": self.leaves,
            "statuses": self.statuses,
        }


async def run() -> None:
    order = Order(**json.loads(await _line()))
    _room_for(order.clients)
    if order.makes_way:
        _make_way()
    random.seed(order.number)
    swarm = Swarm(order)
    await swarm.fill()
    gc.freeze()  # a look for garbage among all that was imported would be measured as latency
    print(READY, flush=True)
    await _line()
    wanted = ((order.leaves_per_s > 0, swarm.churn), (order.watch, swarm.watch))
    chores = [asyncio.create_task(chore()) for is_wanted, chore in wanted if is_wanted]
    ended = asyncio.create_task(_line())
    await asyncio.wait({ended, *chores}, return_when=asyncio.FIRST_COMPLETED)
    for chore in chores:
        if chore.done():
            await chore  # raises what ended it
        chore.cancel()
    await ended
    result = swarm.result()
    await swarm.end()
    print(json.dumps(result), flush=True)


async def _line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def _make_way() -> None:
    """In life a thousand peers have processors of their own. A process that is woken by what the coordinator sends
    would otherwise take the processor from it in the middle of what it sends to all."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # Linux, where each session counts as one before niceness does
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def _room_for(clients: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_EACH * clients + FILES_FOR_OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then connections fail, and are counted
            allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


if __name__ == "__main__":
    asyncio.run(run())
