"""The coordinator's gRPC service for whoever looks on, and for the run's owner: status, control, tokens, kicks.

Who a caller is was settled before (gate.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import grpc

from protomodels_cli.coordinator import bad_requests, calls, events, refusals
from protomodels_cli.coordinator.doorkeeper import Doorkeeper, Revoked
from protomodels_cli.coordinator.messages import clean, owners_event
from protomodels_cli.coordinator.peers import Rest
from protomodels_cli.coordinator.reasons import Kicked
from protomodels_cli.coordinator.run import Run
from protomodels_cli.coordinator.snapshots.upkeep import beside
from protomodels_cli.coordinator.tokens import MOST_GUESTS, MOST_NAME, MOST_TOKENS, OWN, Token
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc

PEER_ID = re.compile(r"p[0-9a-f]{8,12}")


class Desk(rpc.OperatorServicer):
    def __init__(
        self,
        doorkeeper: Doorkeeper,
        run: Run,
        status: Callable[[], pb.RunStatus],
    ):
        self._doorkeeper, self._run, self._status = doorkeeper, run, status

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.RunStatus:
        return self._status()

    async def Control(self, request: pb.ControlRequest, context: grpc.aio.ServicerContext) -> pb.ControlReply:
        if (event := owners_event(request)) is None:
            await calls.reject(context, bad_requests.UnknownAction(request.action))
        else:
            self._run.hear(event)
        return pb.ControlReply()

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateTokenReply:
        uses = max(1, min(request.uses, MOST_GUESTS))
        seconds = request.seconds if request.seconds > 0 else None
        try:
            made, token = await beside(self._doorkeeper.create, uses, seconds, clean(request.person)[:MOST_NAME])
        except ValueError:
            await calls.refuse(context, refusals.TooManyTokens(MOST_TOKENS))
        return pb.CreateTokenReply(id=made.id, token=token)

    async def ListTokens(self, request: pb.ListTokensRequest, context: grpc.aio.ServicerContext) -> pb.ListTokensReply:
        now = self._doorkeeper.now()
        own = pb.TokenStatus(id=OWN)
        return pb.ListTokensReply(tokens=[own, *(_shown(one, now) for one in self._doorkeeper.guests.tokens)])

    async def RevokeToken(
        self, request: pb.RevokeTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.RevokeTokenReply:
        if (revoked := await beside(self._doorkeeper.revoke, request.id)) is None:
            await calls.refuse(context, refusals.NoSuchToken(request.id))
            return pb.RevokeTokenReply()
        return pb.RevokeTokenReply(token=revoked.new)

    async def Rest(self, request: pb.RestRequest, context: grpc.aio.ServicerContext) -> pb.RestReply:
        found = self._peers_called(request.peer)
        if len(found) != 1:
            await calls.refuse(context, refusals.NoSuchPeer(request.peer, len(found)))
        if request.over and any(p.peer == found[0] and p.rests_by_itself for p in self._status().peers):
            await calls.refuse(context, refusals.RestsByItself(request.peer))
        self._run.hear(events.Rests(found[0], None if request.over else Rest(own=False)))
        return pb.RestReply(peer=found[0])

    def _peers_called(self, name: str) -> list[str]:
        return [peer.peer for peer in self._status().peers if name in (peer.peer, peer.name)]

    async def Kick(self, request: pb.KickRequest, context: grpc.aio.ServicerContext) -> pb.KickReply:
        found = self._peers_called(request.peer)
        if not found and PEER_ID.fullmatch(request.peer):  # it may be away, and would come back
            found = [request.peer]
        if len(found) != 1:
            await calls.refuse(context, refusals.NoSuchPeer(request.peer, len(found)))
        revoked = await asyncio.shield(asyncio.create_task(self._kick(found[0])))  # all of it, though the caller goes
        return pb.KickReply(peer=found[0], revoked=revoked.id, token=revoked.new)

    async def _kick(self, peer: str) -> Revoked:
        revoked = await beside(self._doorkeeper.kick, peer)
        self._run.hear(events.Trouble(peer, Kicked()))
        return revoked


def _shown(token: Token, now: float) -> pb.TokenStatus:
    return pb.TokenStatus(
        id=token.id,
        made=token.made,
        expires=token.expires or 0.0,
        uses=token.uses,
        used=len(token.guests),
        peers=[peer for _, peer in token.guests],
        ended=token.end(now) or "",
        person=token.person,
    )
