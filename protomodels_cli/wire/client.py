"""The client of a coordinator: a channel that trusts one run's authority, the calls, and their errors.

Knows how to call. It must not know what a peer does, nor show anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from protomodels_cli.errors import EXIT_REFUSED, UserError
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.channels import CHANNEL_OPTIONS
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.wire.join_link import (
    Address,
    CrowdedError,
    JoinLink,
    LinkError,
    UnreachableError,
    address,
    find_coordinator,
    parse_address,
)
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import COORDINATOR_NAME

MOST_KNOWN = 16  # addresses of one coordinator
# Seconds for calls on a channel that was left: longer than any, so that none is cut off. Keepalive ends those on a dead
# connection within half a minute.
LAST_CALLS = 7 * 86_400.0
CLOSED = "the coordinator closed the connection"
BULK = frozenset({"Upload", "Fetch"})  # calls that carry parts: under a cap nothing else waits behind them
Metadata = Sequence[tuple[str, str]]  # of a call: names and values


class Refused(UserError):
    """The coordinator said no; the kind is that of the reason it gave."""

    exit_code = EXIT_REFUSED


class Operator:
    def __init__(self, channel: grpc.aio.Channel, token: str, owner: str = "", peer: Metadata = ()):
        self._stub, self._metadata = rpc.OperatorStub(channel), (("token", token), ("owner", owner), *peer)

    async def status(self) -> pb.RunStatus:
        found: pb.RunStatus = await self._call(self._stub.Status, pb.StatusRequest())
        return found

    async def control(self, action: str) -> None:
        await self._call(self._stub.Control, pb.ControlRequest(action=pb.ControlRequest.Action.Value(action)))

    async def create_token(self, uses: int, seconds: float, person: str = "") -> pb.CreateTokenReply:
        request = pb.CreateTokenRequest(uses=uses, seconds=seconds, person=person)
        made: pb.CreateTokenReply = await self._call(self._stub.CreateToken, request)
        return made

    async def list_tokens(self) -> pb.ListTokensReply:
        found: pb.ListTokensReply = await self._call(self._stub.ListTokens, pb.ListTokensRequest())
        return found

    async def revoke_token(self, id: str) -> pb.RevokeTokenReply:
        revoked: pb.RevokeTokenReply = await self._call(self._stub.RevokeToken, pb.RevokeTokenRequest(id=id))
        return revoked

    async def kick(self, peer: str) -> pb.KickReply:
        kicked: pb.KickReply = await self._call(self._stub.Kick, pb.KickRequest(peer=peer))
        return kicked

    async def rest(self, peer: str, over: bool) -> pb.RestReply:
        rests: pb.RestReply = await self._call(self._stub.Rest, pb.RestRequest(peer=peer, over=over))
        return rests

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=10)
        except grpc.aio.AioRpcError as e:
            raise in_words(e) from None


def in_words(error: grpc.aio.AioRpcError, failure: type[UnreachableError] = UnreachableError) -> UserError:
    """A refusal carries a sentence and a fix of the coordinator's; anything else is a `failure` of the network. One
    that had too many callers is no refusal: the caller tries again."""
    what, _, fix = (error.details() or "").partition("\n")
    kind = str(dict(error.trailing_metadata() or ()).get("kind", ""))
    if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION) and fix:
        return Refused(what, fix, kind=kind)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and fix:
        return CrowdedError(what, fix, kind=kind)
    fix = "check this machine's connection, and that the coordinator still runs"
    return failure(f"cannot reach the coordinator: {why_failed(error)}", fix, kind="unreachable")


def was_closed(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call ended while this side was writing to it, which gRPC calls an internal error of its own. No
    program of ours answers with that code."""
    return error.code() is grpc.StatusCode.INTERNAL


def why_failed(error: grpc.aio.AioRpcError) -> str:
    """In one line."""
    return CLOSED if was_closed(error) else (error.details() or "").partition("\n")[0]


def _channel(where: Address, authority_pem: bytes, most_bytes: int) -> grpc.aio.Channel:
    """A channel to the coordinator at this address that trusts this run's authority alone."""
    options = [
        *CHANNEL_OPTIONS,
        ("grpc.ssl_target_name_override", COORDINATOR_NAME),
        ("grpc.max_receive_message_length", most_bytes),
        # By default gRPC waits up to two minutes between attempts: reconnect sooner. What gRPC calls the minimum
        # backoff is also the time that one attempt may take, which a slow or full connection needs, and a coordinator's
        # port where a caller waits in line.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.min_reconnect_backoff_ms", 8000),
    ]
    return grpc.aio.secure_channel(address(*where), grpc.ssl_channel_credentials(authority_pem), options)


class Line(rpc.PeeringStub):
    """The calls of a run's coordinator, at one of several addresses: the next one is tried after a failure.

    A channel that is left closes once the calls that are under way on it have ended by themselves."""

    def __init__(
        self,
        addresses: Iterable[Address],
        channel: Callable[[Address], grpc.aio.Channel],
        cap: Cap | None = None,
    ):
        self._cap = cap
        self._addresses, self._at, self._open = list(addresses), 0, channel
        self._over: Connection | None = None
        self._channels: dict[tuple[Address, bool], tuple[grpc.aio.Channel, rpc.PeeringStub]] = {}
        self._left: dict[asyncio.Task[None], grpc.aio.Channel] = {}  # not used for new calls, and what closes them

    @property
    def address(self) -> Address:
        return self._addresses[self._at]

    def lead_over(self, connection: Connection) -> None:
        """From now on calls go over this emulated connection."""
        self._over = connection
        self.renew()

    def renew(self) -> None:
        """From now on calls go over new connections."""
        for channel, _ in self._channels.values():
            closing = asyncio.create_task(channel.close(LAST_CALLS))
            self._left[closing] = channel
            closing.add_done_callback(self._left.pop)
        self._channels = {}

    def look_elsewhere(self) -> None:
        """From now on calls go to the next address."""
        self._at = (self._at + 1) % len(self._addresses)

    def add(self, hosts: Iterable[str]) -> None:
        """Further addresses, after those that are known."""
        for host in hosts:
            with contextlib.suppress(LinkError):  # nothing that could be dialled
                if (found := parse_address(host)) not in self._addresses and len(self._addresses) < MOST_KNOWN:
                    self._addresses.append(found)

    def __getattr__(self, call: str) -> Any:
        key = self.address, self._cap is not None and call in BULK
        if key not in self._channels:
            channel = self._open(self._way(is_bulk=key[1]))
            self._channels[key] = channel, rpc.PeeringStub(channel)
        return getattr(self._channels[key][1], call)

    def _way(self, is_bulk: bool) -> Address:
        way = self.address if self._over is None else self._over.way_to(self.address)
        return way if self._cap is None else self._cap.way_to(way, first=not is_bulk)

    async def close(self) -> None:
        left = dict(self._left)
        for closing in left:
            closing.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for channel in (*left.values(), *(channel for channel, _ in self._channels.values())):
            await channel.close()
        if self._over is not None:
            await self._over.close()


@asynccontextmanager
async def coordinator_line(
    link: JoinLink, authority_pem: bytes, most_bytes: int, cap: Cap | None = None
) -> AsyncIterator[Line]:
    line = Line(link.addresses, lambda where: _channel(where, authority_pem, most_bytes), cap)
    try:
        yield line
    finally:
        await line.close()


@asynccontextmanager
async def coordinator_channel(link: JoinLink, authority_pem: bytes) -> AsyncIterator[grpc.aio.Channel]:
    """To the first of the link's addresses."""
    async with _channel((link.host, link.port), authority_pem, 4 << 20) as channel:
        yield channel


@asynccontextmanager
async def operator(link: JoinLink, owner: str = "", peer: Metadata = ()) -> AsyncIterator[Operator]:
    """`owner`: the secret of the run directory, where more than its status is asked for. `peer`: what a peer shows, to
    look on also when the run has another link by now."""
    link, authority = await find_coordinator(link)
    async with coordinator_channel(link, authority) as channel:
        yield Operator(channel, link.token, owner, peer)
