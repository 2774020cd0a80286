"""One attacker with the run's token, in a process of its own. It says when it has begun, and what it did when its input
ends.

It comes back as another peer each time that it is sent away. Where it has to compute, it is the ordinary peer, with
messages that are changed on their way out; else it is made from the protocol alone, and has no model.

python -m protomodels_cli.bench.insider_peer '{"link": "pm://…", "attack": "stands-still", …}'
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.bench import strangers
from protomodels_cli.bench.attack import READY
from protomodels_cli.bench.edges import Edges, Heard
from protomodels_cli.coordinator.message_fields import LEAST_FLOPS
from protomodels_cli.errors import UserError
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire import troubles
from protomodels_cli.wire.channels import HEARTBEATS
from protomodels_cli.wire.client import coordinator_channel
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_key, public_key_of

NAME = "attacker"  # each of its ids has a number behind it
BACK_AFTER = 0.5  # seconds until it is back as another
FLOPS, MEMORY = 1e11, 1 << 40  # that a peer without a model says it has
FAST = 15.0  # messages a second of one id: with more it would be sent away for that alone
TIMES = 6  # complaints with every report
WRONG = "0" * 64
ONLY_SPARES = ("reads-others", "edges")  # attacks by peers that can hold no stage, and have a right to none
AUDITS = ("lying-auditor",)  # by a peer too slow for a stage: only spares audit
Body = dict[str, Any]  # of a message: what ControlStream.send takes


@dataclass(frozen=True)
class Order:
    link: str
    attack: str
    folder: str
    silent: int = 48  # holds-calls: connections of silent calls, and of callers that enrol all the time
    enrolling: int = 32
    messages: int = 0  # edges: how many in all; 0: until its input ends
    per_second: float = 50.0


# What an ordinary peer says, changed


def _false_hashes(body: Body) -> list[Body]:
    if "done" in body and body["done"].HasField("recorded"):
        recorded = body["done"].recorded
        for name in ("forward_in", "forward_out", "backward_in", "backward_out"):
            hashes = getattr(recorded, name)
            hashes[:] = [hashlib.sha256(one).digest() for one in hashes]
        return [body, END]
    return [body]


def _impossible_times(body: Body) -> list[Body]:
    if "done" in body and body["done"].norms:
        body["done"].usage.compute_s = 5e-324
    return [body]


def _link_broken(body: Body) -> list[Body]:
    if "done" not in body or not body["done"].norms:
        return [body]
    about = [troubles.LinkBroken(stage) for stage in (0, 1)]  # one of them is its neighbour's
    generation = body["done"].generation
    return [*({"trouble": troubles.to_message(one, generation)} for one in about * TIMES), body]


def _no_record(body: Body) -> list[Body]:
    if "done" in body:
        body["done"].ClearField("recorded")
    return [body]


def _accuses(body: Body) -> list[Body]:
    if "verdict" in body:
        for one in body["verdict"].compared:
            one.wild = one.numbers
    return [body]


END: Body = {}  # the session is closed
CHANGES: dict[str, Callable[[Body], list[Body]]] = {
    "false-hashes": _false_hashes,
    "impossible-times": _impossible_times,
    "link-broken": _link_broken,
    "no-record": _no_record,
    "lying-auditor": _accuses,
}


class Attacker:
    def __init__(self, order: Order):
        self._order, self._link = order, JoinLink.parse(order.link)
        self._numbers, self._draw, self._key = count(1), random.Random(32), public_key_of(new_key())
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        attack = self._order.attack
        if attack in CHANGES:
            await self._again(self._take_part)
        elif attack == "holds-calls":
            await self._hold_calls()
        elif attack == "edges":
            sessions = max(1, round(self._order.per_second / FAST))
            await asyncio.gather(*(self._again(self._send_edges) for _ in range(sessions)))
        else:
            await self._again({"reads-others": self._read_others}.get(attack, self._pretend))

    async def _again(self, attack: Callable[[], Awaitable[None]]) -> None:
        while not self._is_done():
            with contextlib.suppress(UserError, OSError, EOFError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await attack()
            await asyncio.sleep(BACK_AFTER)

    @property
    def has_begun(self) -> bool:
        return any(number for what, number in self.done.items() if what != "ids")

    def _is_done(self) -> bool:
        return 0 < self._order.messages <= self.done["messages"]

    # An ordinary peer

    async def _take_part(self) -> None:
        from protomodels_cli.worker import control, device, session
        from protomodels_cli.worker.join import Options, join

        change, done = CHANGES[self._order.attack], self.done

        class Liar(control.ControlStream):
            def send(self, **body: Any) -> None:
                before = {kind: value.SerializeToString() for kind, value in body.items()}
                said = change(body)
                done["lies"] += len(said) > 1 or before != {k: v.SerializeToString() for k, v in body.items()}
                for one in said:
                    if one is END:
                        self.end()
                    else:
                        super().send(**one)

        vars(session)["ControlStream"] = Liar
        if self._order.attack in AUDITS:
            vars(device)["measure_flops"] = lambda spec, on, seconds=0.0: LEAST_FLOPS
        number = next(self._numbers)
        folder = Path(self._order.folder) / f"{number}"  # with a key of its own: it comes back as another
        self.done["ids"] += 1
        await join(Options(self._link, ("cpu",), f"{NAME}-{number}", folder, 0, 5.0), lambda text: None)

    # Clients without a model

    @asynccontextmanager
    async def _enrolled(self) -> AsyncIterator[tuple[rpc.PeeringStub, pb.EnrolReply, list[tuple[str, str]]]]:
        async with coordinator_channel(self._link, await fetch_authority(self._link)) as channel:
            stub = rpc.PeeringStub(channel)
            request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=self._key)
            reply = await stub.Enrol(request, metadata=(("token", self._link.token),), timeout=30)
            self.done["ids"] += 1
            yield stub, reply, [("peer", reply.peer), ("secret", reply.secret)]

    @asynccontextmanager
    async def _in_session(self, stub: rpc.PeeringStub, reply: pb.EnrolReply, shown: Any) -> AsyncIterator[Any]:
        call = stub.Session(metadata=shown)
        memory = 1 if self._order.attack in ONLY_SPARES else MEMORY
        register = pb.Register(spec_sha256=reply.spec_sha256, device="cpu", memory=memory, flops=FLOPS, dtype="float32")
        register.name = f"{NAME}-{next(self._numbers)}"
        await call.write(pb.PeerMessage(register=register))
        beating = asyncio.create_task(_beat(call, spec_of(reply).limits.lease_seconds / HEARTBEATS))
        try:
            yield call
        finally:
            beating.cancel()
            call.cancel()

    async def _pretend(self) -> None:
        """Says yes to all: it has every part, it is ready for any stage. Does nothing."""
        async with self._enrolled() as (stub, reply, shown), self._in_session(stub, reply, shown) as call:
            while (message := await call.read()) is not grpc.aio.EOF:
                for said in self._promises(message):
                    self.done["lies"] += 1
                    await call.write(said)

    def _promises(self, message: pb.CoordinatorMessage) -> Iterator[pb.PeerMessage]:
        match message.WhichOneof("body"):
            case "prepare":
                told = message.prepare
                part = pb.Part(lineage=told.restore.lineage, step=told.step, stage=told.stage)
                part.sha256 = told.restore.sha256
                yield pb.PeerMessage(ready=part)
            case "prove":
                asked = message.prove
                yield pb.PeerMessage(proof=pb.Proof(part=asked.part, nonce=asked.nonce, sha256=WRONG))
            case "keep" if self._order.attack == "lies-about-parts":
                yield from (pb.PeerMessage(prefetched=part) for part in message.keep.newest)
            case "assignment" | "turn" | "audit":
                self.done["held"] += 1  # and nothing follows
            case _:
                pass

    async def _read_others(self) -> None:
        """Fetches every part that it knows of: as a spare, and with no session at all."""
        async with self._enrolled() as (stub, reply, shown), self._in_session(stub, reply, shown) as call:
            async with asyncio.timeout(10):
                while (message := await call.read()) is not grpc.aio.EOF:
                    if message.WhichOneof("body") == "keep" and message.keep.newest:
                        break
            parts = [] if message is grpc.aio.EOF else list(message.keep.newest)
            await self._fetch(stub, shown, parts)
        async with self._enrolled() as (stub, _, shown):
            await self._fetch(stub, shown, parts)

    async def _fetch(self, stub: rpc.PeeringStub, shown: Any, parts: list[pb.Part]) -> None:
        for part in parts:
            request = pb.FetchRequest(lineage=part.lineage, step=part.step, stage=part.stage, size=1 << 16)
            self.done["lies"] += 1
            try:
                async for piece in stub.Fetch(_one(request), metadata=shown, timeout=10):
                    self.done["stolen bytes"] += len(piece.data)
                self.done["stolen bytes"] += len((await stub.Locate(request, metadata=shown, timeout=10)).url)
            except grpc.aio.AioRpcError:
                self.done["refused"] += 1

    async def _hold_calls(self) -> None:
        """From the address of everybody else."""
        request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=self._key).SerializeToString()
        where, order = (self._link.host, self._link.port), self._order
        await strangers.hold_calls(where, self._link.token, request, order.silent, order.enrolling, self.done)

    async def _send_edges(self) -> None:
        async with self._enrolled() as (stub, reply, shown), self._in_session(stub, reply, shown) as call:
            heard, edges = Heard(), Edges(self._draw, spec_of(reply))

            async def listen() -> None:
                while (message := await call.read()) is not grpc.aio.EOF:
                    heard.hear(message)

            listening = asyncio.create_task(listen())
            try:
                while not (listening.done() or self._is_done()):
                    await call.write(edges.message(heard))
                    self.done["messages"] += 1
                    await asyncio.sleep(1 / FAST)
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


def spec_of(reply: pb.EnrolReply) -> RunSpec:
    return spec_from(json.loads(reply.spec_json))


async def _one(request: pb.FetchRequest) -> AsyncIterator[pb.FetchRequest]:
    yield request


async def _beat(call: Any, seconds: float) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await asyncio.sleep(seconds)
            await call.write(pb.PeerMessage(heartbeat=pb.Heartbeat()))


async def main(order: Order) -> None:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it tells of every write to a connection that was cut
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda *_: None)
    loop.add_reader(sys.stdin, over.set)
    attacker = Attacker(order)
    attacking = asyncio.create_task(attacker.run())
    told = asyncio.create_task(over.wait())
    while not (attacker.has_begun or attacking.done() or told.done()):
        await asyncio.sleep(0.1)
    print(READY, flush=True)
    await asyncio.wait([attacking, told], return_when=asyncio.FIRST_COMPLETED)
    failed = attacking.exception() if attacking.done() and not attacking.cancelled() else None
    print(json.dumps({**attacker.done, "failed": repr(failed) if failed else ""}), flush=True)
    os._exit(0)  # what is open is closed by the system


if __name__ == "__main__":
    asyncio.run(main(Order(**json.loads(sys.argv[1]))))
