"""The client of a coordinator: a channel that trusts one run's authority, the calls, and their errors.

Knows how to call. It must not know what a peer does, nor show anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from protomodels_cli.errors import EXIT_REFUSED, UserError
from protomodels_cli.wire.channels import CHANNEL_OPTIONS
from protomodels_cli.wire.join_link import JoinLink, UnreachableError, address, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import COORDINATOR_NAME

Metadata = tuple[tuple[str, str], ...]  # of a call: names and values


class Refused(UserError):
    """The coordinator said no; the kind is that of the reason it gave."""

    exit_code = EXIT_REFUSED


class Operator:
    def __init__(self, channel: grpc.aio.Channel, token: str):
        self._stub, self._metadata = rpc.OperatorStub(channel), (("token", token),)

    async def status(self) -> pb.RunStatus:
        try:
            return await self._stub.Status(pb.StatusRequest(), metadata=self._metadata, timeout=10)
        except grpc.aio.AioRpcError as e:
            raise in_words(e) from None

    async def control(self, action: str, owner: str) -> None:
        request = pb.ControlRequest(action=pb.ControlRequest.Action.Value(action))
        try:
            await self._stub.Control(request, metadata=(("owner", owner),), timeout=10)
        except grpc.aio.AioRpcError as e:
            raise in_words(e) from None


def in_words(error: grpc.aio.AioRpcError) -> UserError:
    """A refusal carries a sentence and a fix of the coordinator's; anything else is a failure of the network."""
    what, _, fix = (error.details() or "").partition("\n")
    if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION) and fix:
        return Refused(what, fix, kind=str(dict(error.trailing_metadata() or ()).get("kind", "")))
    fix = "check this machine's connection, and that the coordinator still runs"
    return UnreachableError(f"cannot reach the coordinator: {what}", fix, kind="unreachable")


@asynccontextmanager
async def coordinator_channel(
    link: JoinLink, authority_pem: bytes, most_bytes: int = 4 << 20
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the coordinator that trusts this run's authority alone."""
    options = [
        *CHANNEL_OPTIONS,
        ("grpc.ssl_target_name_override", COORDINATOR_NAME),
        ("grpc.max_receive_message_length", most_bytes),
        # By default gRPC waits up to two minutes between attempts: reconnect sooner. What gRPC calls the minimum
        # backoff is also the time that one attempt may take, which a slow or full connection needs.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.min_reconnect_backoff_ms", 4000),
    ]
    credentials = grpc.ssl_channel_credentials(authority_pem)
    async with grpc.aio.secure_channel(address(link.host, link.port), credentials, options) as channel:
        yield channel


@asynccontextmanager
async def operator(link: JoinLink) -> AsyncIterator[Operator]:
    authority = await fetch_authority(link)
    async with coordinator_channel(link, authority) as channel:
        yield Operator(channel, link.token)
