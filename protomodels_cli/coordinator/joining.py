"""Joining a run and staying in it: who may, and what a peer gets to show: a secret and a certificate that end together.

Knows the run's authority and the doorkeeper. It must not know sessions, nor what a peer does.
"""

from __future__ import annotations

import json
import time

import grpc

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.coordinator import calls, refusals
from protomodels_cli.coordinator.doorkeeper import Doorkeeper
from protomodels_cli.coordinator.messages import clean
from protomodels_cli.coordinator.run_dir import RunDir
from protomodels_cli.coordinator.sessions import CoolingOff
from protomodels_cli.coordinator.snapshots.upkeep import beside
from protomodels_cli.observe.logs import WIRE
from protomodels_cli.spec.load import for_peers
from protomodels_cli.spec.plugins import packages_used
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.addresses import network_of
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.rates import Buckets, Rate
from protomodels_cli.wire.tls import checked_key, peer_name

MOST_PEERS = 10_000  # in session
JOINS_SECONDS = 60.0  # in which as many peers may join from one network as may connect from there
RENEWALS = 8  # of one peer in the life of a certificate; two are needed


class Joining:
    def __init__(self, spec: RunSpec, run_dir: RunDir, doorkeeper: Doorkeeper):
        self._run_dir, self._doorkeeper = run_dir, doorkeeper
        told = for_peers(spec, run_dir.base)
        self._told, self.spec_sha256 = json.dumps(told.model_dump(mode="json")), told.sha256()
        self._packages = packages_used(spec)  # once: finding them reads many files
        self.cooling = CoolingOff()
        most, self._life = spec.limits.connections_per_address, spec.limits.certificate_seconds
        self._joins = Buckets(Rate(most / JOINS_SECONDS, most))
        # A connection's first join takes no other's place, or a caller who joins again and again would leave none to
        # newcomers. How many connections come is limited already (admission.py).
        self._first_joins = Buckets(Rate(1 / JOINS_SECONDS, 1))
        self._renewals = Buckets(Rate(RENEWALS / self._life, RENEWALS))

    async def enrol(
        self, request: pb.EnrolRequest, context: grpc.aio.ServicerContext, address: str, connection: int, here: int
    ) -> pb.EnrolReply:
        """`connection`: the number of the caller's. `here`: how many peers are in session."""
        network = network_of(address) if address else ""
        if request.protocol != PROTOCOL:
            theirs = clean(request.version), request.protocol
            await calls.refuse(context, refusals.OtherProtocol(*theirs, __version__, PROTOCOL))
        token, now = calls.metadata(context, "token"), time.monotonic()
        if left := self.cooling.seconds_left(self._doorkeeper.id_of(token), address, now):
            await calls.refuse(context, refusals.CoolingOff(left))
        if not (self._first_joins.take(str(connection), now) or self._joins.take(network, now)):
            await calls.refuse(context, refusals.TooManyJoins(1 / self._joins.rate.per_second))
        if here >= MOST_PEERS:
            await calls.refuse(context, refusals.TooManyPeers(MOST_PEERS))
        await self._check_key(request.public_key_pem, context)
        peer = await beside(self._doorkeeper.admit, token, request.public_key_pem)
        if not isinstance(peer, str):
            await calls.refuse(context, peer)
            return pb.EnrolReply()
        WIRE.info("%s enrolled from %s", peer, address)
        until = self._until()
        return pb.EnrolReply(
            peer=peer,
            secret=self._run_dir.secret_of(peer, until),
            certificate_pem=self._run_dir.authority.issue(peer_name(peer), request.public_key_pem, until),
            spec_json=self._told,
            spec_sha256=self.spec_sha256,
            clock=time.time(),
            packages=self._packages,
            version=__version__,
        )

    async def renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> tuple[pb.RenewReply, float]:
        """What the peer shows from now on, and when it ends. The gate has seen that what it showed is good still."""
        peer, until = calls.metadata(context, "peer"), self._until()
        if not self._renewals.take(peer, time.monotonic()):
            await calls.refuse(context, refusals.TooManyRenewals(1 / self._renewals.rate.per_second))
        await self._check_key(request.public_key_pem, context)
        WIRE.info("%s has a new certificate", peer)
        certificate = self._run_dir.authority.issue(peer_name(peer), request.public_key_pem, until)
        return pb.RenewReply(secret=self._run_dir.secret_of(peer, until), certificate_pem=certificate), until

    def _until(self) -> int:
        return int(self._doorkeeper.now() + self._life)

    async def _check_key(self, public_key_pem: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            checked_key(public_key_pem)
        except ValueError as e:
            await calls.refuse(context, refusals.InvalidKey(str(e), __version__))
