"""Words that cross: what a peer and the coordinator make of what was said before the other knew better."""

from __future__ import annotations

import asyncio
import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from conftest import make_spec
from led import Led
from waiting import until

from protomodels_cli.coordinator import events, machine, outgoing
from protomodels_cli.coordinator.doorkeeper import Doorkeeper
from protomodels_cli.coordinator.messages import turn_message
from protomodels_cli.coordinator.owner import Desk
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.service import Service
from protomodels_cli.coordinator.sessions import ControlStream, EnrolledPeer
from protomodels_cli.coordinator.work import Task
from protomodels_cli.model.stage import Sync
from protomodels_cli.protocol.messages import BadMessage
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.client import Line
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_authority, peer_name
from protomodels_cli.wire.troubles import Failed, OutOfMemory
from protomodels_cli.worker import notices, orders
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.generation import Generation
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.papers import Papers
from protomodels_cli.worker.session import Session
from protomodels_cli.worker.snapshots import part_store
from protomodels_cli.worker.snapshots.exchange import SnapshotExchange
from protomodels_cli.worker.snapshots.pacing import NO_STAGE
from protomodels_cli.worker.telling import PeerError, trouble_of


def a_session(folder: Path, channel: Any = None, spec: RunSpec | None = None, line: Line | None = None) -> Session:
    """Without a channel or a line: one that has no coordinator."""
    identity = new_authority().issue_with_key(peer_name("p"))
    listener, spec = Listener(identity), spec or make_spec()
    return Session(
        spec,
        Cards.of([torch.device("cpu")], spec),
        Papers(identity, ()),
        listener,
        line or Line([("", 0)], lambda where: channel),
        folder,
        lambda notice: None,
        3600.0,
    )


def a_generation(session: Session, number: int) -> Generation:
    assigned = pb.Assignment(generation=number)
    return Generation(assigned, session.spec, session._network, session._engine, session._report, print)


@pytest.mark.parametrize(
    ("error", "trouble"),
    [(MemoryError(), OutOfMemory), (orders.WrongOrder(), Failed), (BadMessage("stale"), None)],
)
def test_a_stage_that_failed_is_not_offered_again_whichever_generation_it_failed_in(tmp_path, error, trouble):
    """A decision may have been applied by half. What a neighbour of then sent is forgotten with it."""

    async def story() -> None:
        session = a_session(tmp_path)
        session._generation = a_generation(session, 2)
        session._receive(1, orders.Failure(error))
        assert session._over.done() == (trouble is not None)
        if trouble is not None:
            with pytest.raises(PeerError if trouble is OutOfMemory else type(error)) as caught:
                session._over.result()
            assert isinstance(trouble_of(caught.value), trouble)
        session._receive(2, orders.TaskReport(1, orders.Usage()))
        outbox = session._control._outbox
        said = [outbox.get_nowait() for _ in range(outbox.qsize())]
        assert [message.WhichOneof("body") for message in said] == ["done" if trouble is None else "trouble"]
        assert trouble is None or said[0].trouble.kind == trouble.kind

    asyncio.run(story())


def test_a_sync_compares_hashes_and_carries_no_bytes(tmp_path):
    """A stage that differs says so. The bytes of U would be its size in every sync, for every peer."""
    state = machine.start(make_spec(stages=1), "u" * 64, (1, "t" * 64))
    turn = turn_message(outgoing.turn(state, None, Task(5, "sync", 3, 0.0)), 4, 0, "t" * 64)
    assert (turn.sync.basis_sha256, turn.sync.t_fixed_sha256) == ("u" * 64, "t" * 64)
    assert turn.ByteSize() < 200
    told: list[notices.Notice] = []

    async def story() -> None:
        session = a_session(tmp_path)
        session.tell = told.append
        session._generation = a_generation(session, 0)
        for basis in ("u", "x"):
            turn.task += 1
            session._take_turn(turn)
            session._receive(0, orders.TaskReport(5, orders.Usage(), Sync(0, basis * 64, 1, "t" * 64)))
            assert len(told) == (basis == "x")

    asyncio.run(story())
    assert told == [notices.HashMismatch("U", 0)]


def test_the_last_words_of_a_peer_are_heard(tmp_path):
    """Also by a coordinator that has its hands full: why a peer went is not lost with its connection."""
    heard: list[pb.PeerMessage] = []

    class Busy(rpc.PeeringServicer):
        async def Session(self, request_iterator: Any, context: Any) -> Any:
            async for message in request_iterator:
                heard.append(message)
                if len(heard) == 1:
                    yield pb.CoordinatorMessage(number=1, spare=pb.Spare(why="all stages have a holder"))
                await asyncio.sleep(0.3)

    async def story() -> None:
        server = grpc.aio.server()
        rpc.add_PeeringServicer_to_server(Busy(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            session = a_session(tmp_path, channel)

            async def introduce() -> pb.Register:
                return pb.Register()

            running = asyncio.create_task(session.run(introduce))
            await until(lambda: session._control._heard)
            session._fail(MemoryError("full"))
            with pytest.raises(PeerError):
                await running
        await server.stop(None)

    asyncio.run(story())
    assert [message.WhichOneof("body") for message in heard] == ["register", "trouble"]
    assert heard[-1].trouble.kind == OutOfMemory.kind


def test_what_was_decided_about_a_peer_as_it_was_is_not_said_to_the_peer_that_it_is(tmp_path):
    """It describes what it has when it opens a stream; until that is taken, others' events may come before."""

    async def story() -> None:
        spec = make_spec()
        nothing: Any = None
        service = Service(spec, open_run_dir(tmp_path / "run", spec, Path()), Led(), nothing, nothing)
        stream = ControlStream()
        service._enrolled["p"] = EnrolledPeer(0.0, stream=stream, unannounced=2)  # it came, and came again
        for _ in range(2):
            service.send("p", spare=pb.Spare(why="a stage that it has now was not known to be there"))
            assert stream.outbox.empty()
            service.joined_processed("p")
        service.send("p", spare=pb.Spare(why="now it is meant"))
        assert stream.outbox.get_nowait().number == 1

    asyncio.run(story())


def test_a_part_that_could_not_be_written_is_said_until_it_was_heard(tmp_path, monkeypatch):
    """Otherwise its snapshot would be waited for, and no other begun."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def story() -> None:
        told: list[pb.PartFailed] = []
        noted: list[notices.Notice] = []
        nothing: Any = None
        exchange = SnapshotExchange(
            make_spec(),
            tmp_path,
            nothing,
            (),
            asyncio.create_task,
            lambda part_failed: told.append(part_failed),
            noted.append,
            NO_STAGE,
        )
        monkeypatch.setattr(part_store, "save_file", full)
        await exchange.save(1, 6, 2, {})
        still = pb.Keep(begun=[pb.SnapshotName(lineage=1, step=6)])
        await exchange.keep(still)
        assert [(f.lineage, f.step, f.stage) for f in told] == [(1, 6, 2)] * 2
        assert noted == [notices.PartFailed(6, 2, os.strerror(errno.ENOSPC))], "once"
        assert all(noted[0].detail == f.why for f in told)
        await exchange.keep(pb.Keep())
        await exchange.keep(still)  # begun again
        assert len(told) == 2

    asyncio.run(story())


def test_an_action_that_is_none_is_rejected_and_changes_nothing(tmp_path):
    told: list[Any] = []
    kinds: list[str] = []

    async def story() -> None:
        nothing, run_dir = None, open_run_dir(tmp_path / "run", make_spec(), Path())
        server = grpc.aio.server()
        rpc.add_OperatorServicer_to_server(Desk(Doorkeeper(run_dir), Led(submit=told.append), nothing), server)  # type: ignore[arg-type]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            control = partial(rpc.OperatorStub(channel).Control, metadata=(("owner", run_dir.owner),))
            for request in (pb.ControlRequest(), pb.ControlRequest(action=99)):  # type: ignore[arg-type]
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await control(request)
                kinds.append(dict(error.value.trailing_metadata())["kind"])
            assert told == []
            for action in ("PAUSE", "RESUME", "STOP"):
                await control(pb.ControlRequest(action=action))
        await server.stop(None)

    asyncio.run(story())
    assert kinds == ["unknown_action"] * 2
    assert told == [events.PauseRun(), events.ResumeRun(), events.StopRun()]
