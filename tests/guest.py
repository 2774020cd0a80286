"""A client that joins a real coordinator and then says what it likes, as fast as it can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from waiting import PATIENCE

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.wire.client import Metadata, coordinator_channel
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_key, public_key_of


class Guest:
    def __init__(self, stub: rpc.PeeringStub, metadata: Metadata, spec_sha256: str):
        self.stub, self.metadata, self._spec = stub, metadata, spec_sha256

    def session(self) -> Any:
        """A call whose `read` and `write` are the stream's."""
        return self.stub.Session(metadata=self.metadata)

    def register(self) -> pb.PeerMessage:
        register = pb.Register(spec_sha256=self._spec, device="cpu", memory=1 << 34, flops=1e9, name="guest")
        return pb.PeerMessage(register=register)

    async def said_until_the_end(self, call: Any) -> list[pb.CoordinatorMessage]:
        """What the coordinator says until it closes the stream; heartbeats left out. Read it while you write: a write
        that fails ends the stream here, whatever was on its way."""
        said = []
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("body") != "heartbeat":
                said.append(message)
        return said


@asynccontextmanager
async def a_guest(link: JoinLink) -> AsyncIterator[Guest]:
    """Through the door, as any peer."""
    async with coordinator_channel(link, await fetch_authority(link)) as channel:
        stub = rpc.PeeringStub(channel)
        key = public_key_of(new_key())
        request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=key)
        enrolled = await stub.Enrol(request, metadata=(("token", link.token),), timeout=PATIENCE)
        yield Guest(stub, (("peer", enrolled.peer), ("secret", enrolled.secret)), enrolled.spec_sha256)


async def flood(call: Any, message: pb.PeerMessage, per_second: float, seconds: float) -> int:
    """Write it again and again at that rate, until the time is over or nobody takes it: how often."""
    loop, written = asyncio.get_running_loop(), 0
    began = loop.time()
    while (passed := loop.time() - began) < seconds:
        while written < per_second * passed:
            try:
                async with asyncio.timeout(1):
                    await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                return written
            written += 1
        await asyncio.sleep(0.001)
    return written
