"""A peer without a model: it joins, registers and answers as the real one does, and makes its reports up.

Certificates, TLS, the control stream and its heartbeats are the real peer's own. It computes nothing, opens no link to
a neighbour and saves no part of a snapshot; tens of it fit one process beside each other. It needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.errors import UserError
from protomodels_cli.protocol.steps import units
from protomodels_cli.wire.channels import MOST_FROM_COORDINATOR
from protomodels_cli.wire.client import Metadata, coordinator_line
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import Identity, new_key, public_key_of, server_context
from protomodels_cli.worker import problems
from protomodels_cli.worker.control import ControlStream

GIVE_UP_AFTER = 60.0  # seconds without the coordinator
ENROL_SECONDS, REACH_SECONDS = 30.0, 30.0
SPREAD = 0.1  # share of a step over which its stages' reports are spread
FEW_BYTES, LOSS = 1000, 3.0  # what the reports say


@dataclass
class Commit:
    """A step's reports and the turns that answered them, as far as this process has seen them."""

    reported: int = 0
    last_report: float = 0.0
    turned: int = 0
    last_turn: float = 0.0


@dataclass
class Seen:
    """What the light peers of one process have seen. Times are by the system's monotonic clock, as in all processes."""

    joins: list[float] = field(default_factory=list)  # seconds from the first try to the coordinator's first word
    commits: dict[tuple[int, int], Commit] = field(default_factory=dict)  # by generation and step
    lost: Counter[str] = field(default_factory=Counter)  # connections, by reason
    failed: Counter[str] = field(default_factory=Counter)  # calls, by reason

    def commit(self, generation: int, step: int) -> Commit:
        return self.commits.setdefault((generation, step), Commit())


@dataclass(frozen=True)
class Work:
    """What a light peer is told of the run beside what the coordinator tells it."""

    link: JoinLink
    lease_seconds: float
    step_seconds: float
    tokens: int  # of a step


class LightPeer:
    def __init__(self, name: str, work: Work, seen: Seen):
        self._name, self._work, self._seen = name, work, seen
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._control: ControlStream | None = None
        self._assigned: pb.Assignment | None = None  # the stage that it holds, or held when its generation ended
        self._applied = self._prepared = 0
        self._basis = pb.Basis()
        self._began: float | None = time.monotonic()  # None: it is in
        self._working: asyncio.TimerHandle | None = None

    @property
    def holds_a_stage(self) -> bool:
        return self._assigned is not None

    async def take_part(self) -> None:
        """Until it is dismissed or gone. A try to join that fails is made again by whoever calls."""
        link = self._work.link
        async with contextlib.AsyncExitStack() as closing:
            authority, key = await fetch_authority(link), new_key()
            stub = await closing.enter_async_context(coordinator_line(link, authority, MOST_FROM_COORDINATOR))
            request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=public_key_of(key))
            enrolled = await stub.Enrol(request, metadata=(("token", link.token),), timeout=ENROL_SECONDS)
            identity = Identity(key, enrolled.certificate_pem, authority)
            context = server_context(identity)
            listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
            closing.callback(listener.close)
            port = int(listener.sockets[0].getsockname()[1])
            metadata = (("peer", enrolled.peer), ("secret", enrolled.secret))
            self._control = ControlStream(
                stub, metadata, self._work.lease_seconds, GIVE_UP_AFTER, self._over, self._hear_of_loss
            )

            async def introduce() -> list[pb.PeerMessage]:
                register = await self._register(stub, metadata, enrolled.spec_sha256, port)
                return [pb.PeerMessage(register=register)]

            async def obey(message: pb.CoordinatorMessage) -> None:
                if self._began is not None:
                    self._seen.joins.append(time.monotonic() - self._began)
                    self._began = None
                self._obey(message)

            try:
                await self._control.run(introduce, obey)
            finally:
                self._stop_working()

    async def _register(self, stub: rpc.PeeringStub, metadata: Metadata, spec_sha256: str, port: int) -> pb.Register:
        await stub.CheckReachability(pb.ReachabilityRequest(port=port), metadata=metadata, timeout=REACH_SECONDS)
        register = pb.Register(
            spec_sha256=spec_sha256, device="none", memory=1 << 40, flops=1e12, port=port, name=self._name
        )
        if (held := self._assigned) is not None:
            register.holding.CopyFrom(
                pb.Holding(
                    lineage=held.lineage,
                    stage=held.stage,
                    layers_per_stage=held.layers_per_stage,
                    applied=self._applied,
                    prepared=self._prepared,
                )
            )
        return register

    def _hear_of_loss(self, reason: problems.Loss) -> None:
        self._seen.lost[reason.kind] += 1
        self._stop_working()

    def ask_to_leave(self) -> None:
        if self._control is not None:
            self._control.ask_to_leave()

    # What the coordinator says

    def _obey(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("body"):
            case "spare":
                self._stop_working()
                self._assigned = None
            case "wait":
                self._stop_working()
            case "prepare":
                self._prepare(message.prepare)
            case "assignment":
                self._take_assignment(message.assignment)
            case "turn":
                self._take_turn(message.turn)
            case "dismissal":
                if not self._over.done():
                    self._over.set_result(message.dismissal.exit_code)

    def _prepare(self, assigned: pb.Assignment) -> None:
        restore, control = assigned.restore, self._control
        assert control is not None
        part = pb.Part(lineage=restore.lineage, step=restore.step, stage=assigned.stage, sha256=restore.sha256)
        control.send(ready=part)

    def _take_assignment(self, assigned: pb.Assignment) -> None:
        self._stop_working()
        self._assigned = assigned
        if assigned.reuse:
            self._applied = assigned.step  # the decision that it may have missed comes with the assignment
        else:
            self._applied, self._basis = assigned.step, assigned.basis
        self._prepared = 0
        self._report(assigned.task, self._hashes())

    def _take_turn(self, turn: pb.Turn) -> None:
        held = self._assigned
        if held is None or turn.generation != held.generation:
            return
        if turn.HasField("decision"):
            commit = self._seen.commit(turn.generation, turn.decision.step)
            commit.turned += 1
            commit.last_turn = time.monotonic()
            self._applied, self._prepared = turn.decision.step, 0
        match turn.WhichOneof("next"):
            case "connect" | "evaluation" | "finish":
                self._report(turn.task, pb.Done())
            case "sync":
                self._report(turn.task, self._hashes())
            case "step":
                seconds = self._work.step_seconds * (1 - SPREAD * random.random())
                loop = asyncio.get_running_loop()
                self._working = loop.call_later(seconds, self._end_step, turn.task, turn.step.step)

    def _end_step(self, task: int, step: int) -> None:
        held = self._assigned
        assert held is not None
        layers = list(held.layers_per_stage)
        done = pb.Done(
            norms=[pb.UnitNorm(unit=unit, squared=random.random()) for unit in units(layers, held.stage)],
            usage=self._usage(held.stage, len(layers)),
        )
        if held.stage == len(layers) - 1:
            done.loss_sum, done.tokens = LOSS * self._work.tokens, self._work.tokens
        self._prepared = held.generation
        commit = self._seen.commit(held.generation, step)
        commit.reported += 1
        commit.last_report = time.monotonic()
        self._report(task, done)

    def _usage(self, stage: int, stages: int) -> pb.Usage:
        seconds = self._work.step_seconds * random.random()
        return pb.Usage(
            compute_s=seconds,
            wait_s=self._work.step_seconds - seconds,
            forward_bytes=FEW_BYTES * (stage < stages - 1),
            backward_bytes=FEW_BYTES * (stage > 0),
            most_in_flight=1,
            peak_memory=1 << 30,
            cpu_s=time.process_time(),
            forecast_memory=1 << 30,
        )

    def _hashes(self) -> pb.Done:
        """Of what it would hold, had it built its stage."""
        held = self._assigned
        assert held is not None
        return pb.Done(
            t_fixed_sha256=held.t_fixed.sha256,
            t_fixed_version=held.t_fixed.version,
            basis_sha256=self._basis.sha256,
            basis_version=self._basis.version,
        )

    def _report(self, task: int, done: pb.Done) -> None:
        assert self._control is not None
        assert self._assigned is not None
        done.task, done.generation = task, self._assigned.generation
        self._control.send(done=done)

    def _stop_working(self) -> None:
        if self._working is not None:
            self._working.cancel()


async def persist(peer: LightPeer, seen: Seen, patience: float = 1.0) -> None:
    """Take part; where joining fails, count why and try again."""
    while True:
        try:
            await peer.take_part()
            return
        except UserError as e:
            seen.failed[e.kind] += 1
        except grpc.aio.AioRpcError as e:
            seen.failed[e.code().name.lower()] += 1
        await asyncio.sleep(patience)
