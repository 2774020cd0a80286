"""Peers that lose their coordinator find the next one: at the addresses that their link or the lost one has named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from test_session import a_session
from waiting import until

from protomodels_cli.wire.client import Line
from protomodels_cli.wire.join_link import address
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc


class Coordinator(rpc.PeeringServicer):
    """Tells whoever registers of other addresses, and makes it a spare."""

    def __init__(self, *hosts: str):
        self.hosts, self.registered, self.port = hosts, 0, 0

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.CoordinatorMessage]:
        await anext(aiter(request_iterator))
        self.registered += 1
        yield pb.CoordinatorMessage(number=1, addresses=pb.Addresses(hosts=self.hosts))
        yield pb.CoordinatorMessage(number=2, spare=pb.Spare(why="all stages are held"))
        await asyncio.Event().wait()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        server = grpc.aio.server()
        rpc.add_PeeringServicer_to_server(self, server)
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield self.port
        finally:
            await server.stop(None)


def test_a_peer_goes_where_its_coordinator_said_that_another_may_be(tmp_path: Path, unused_port: int):
    """The coordinator that it knows has named others: nobody, nonsense, and the one that takes over."""

    async def story() -> None:
        async with Coordinator().open() as second:
            first = Coordinator(f"127.0.0.1:{unused_port}", "not an address", f"127.0.0.1:{second}")
            async with first.open() as port:
                line = Line([("127.0.0.1", port)], lambda where: grpc.aio.insecure_channel(address(*where)))
                session = a_session(tmp_path, line=line)

                async def introduce() -> pb.Register:
                    return pb.Register()

                running = asyncio.create_task(session.run(introduce))
                await until(lambda: first.registered, "it did not register")
            await until(lambda: line.address == ("127.0.0.1", second) and session._control.connected, "not found")
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await line.close()

    asyncio.run(story())
