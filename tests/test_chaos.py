"""The faults that `pmtrain demo --chaos` injects: what is noted of each, and what a failure to inject one does."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from waiting import PATIENCE

from protomodels_cli.cli import run_demo
from protomodels_cli.launch import chaos as injecting
from protomodels_cli.launch.chaos import Chaos
from protomodels_cli.launch.local import LocalRun
from protomodels_cli.wire.client import Operator
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc

LINK = JoinLink("127.0.0.1", 1, "t" * 22, "f" * 43)


class NotStarted(Exception):
    pass


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LocalRun]:
    """Processes that do nothing, of which none can be started again."""

    def fail() -> subprocess.Popen[bytes]:
        raise NotStarted

    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield LocalRun(tmp_path, LINK, started[0], dict.fromkeys(("coordinator", "peer-1"), fail), {"peer-1": started[1]})
    for process in started:
        process.kill()
        process.wait()


def status(step: int, phase: pb.RunStatus.Phase = pb.RunStatus.RUNNING) -> pb.RunStatus:
    return pb.RunStatus(step=step, phase=phase)


@pytest.mark.parametrize("recovers", [True, False])
def test_a_run_that_does_not_recover_has_no_time_of_recovery(running, monkeypatch, recovers: bool):
    monkeypatch.setattr(injecting, "RECOVERY_SECONDS", 0.2)
    chaos = Chaos(0, running, {}, lambda line: None)
    chaos.saw(status(9))

    async def fault() -> None:
        chaos.saw(status(11) if recovers else status(9, pb.RunStatus.ASSIGNING))

    asyncio.run(chaos._happens("a fault", fault()))
    [found] = chaos.faults
    assert (found["seconds_to_next_step"] is not None) == recovers
    assert found["stalled"] != recovers


class Running(rpc.OperatorServicer):
    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.RunStatus:
        return status(9)


def test_a_fault_that_cannot_be_injected_ends_the_demo(running, monkeypatch):
    monkeypatch.setattr(injecting, "RECOVERY_SECONDS", 0.1)
    for name in ("CALM", "AWAY", "SILENT"):
        monkeypatch.setattr(injecting, name, (0.0, 0.0))
    chaos = Chaos(4, running, {}, lambda line: None)  # whose first fault is a kill

    async def story() -> None:
        server = grpc.aio.server()
        rpc.add_OperatorServicer_to_server(Running(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                making = asyncio.create_task(chaos.make())
                with pytest.raises(NotStarted):
                    async with asyncio.timeout(PATIENCE):
                        await run_demo._follow(running, Operator(channel, "t"), lambda status: None, chaos, making)
        finally:
            await server.stop(None)

    asyncio.run(story())
