"""A peer whose words break the machine goes; the coordinator stays."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from conftest import corpus_of, make_spec
from machine_bench import peer
from waiting import PATIENCE

from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.coordinator import Coordinator
from protomodels_cli.coordinator.messages import peer_of
from protomodels_cli.coordinator.reasons import UnprocessableMessage
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.service import ControlStream, EnrolledPeer
from protomodels_cli.errors import EXIT_OUTSIDE, UserError
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def test_a_registration_that_breaks_the_machine_costs_the_peer_its_session_and_no_more(tmp_path: Path):
    spec = make_spec(stages=2)
    folder = open_run_dir(tmp_path / "run", spec, tmp_path)

    async def blame() -> tuple[pb.CoordinatorMessage, events.Event]:
        coordinator = Coordinator(corpus_of(spec), folder, print)
        stream = ControlStream()
        coordinator._service._enrolled["p0"] = EnrolledPeer(0.0, stream=stream, unannounced=1)
        coordinator._blame(events.Joined(peer(0)), RuntimeError("a bug"))
        with pytest.raises(RuntimeError):  # of nobody's making
            coordinator._blame(events.Tick(), RuntimeError("a bug"))
        return stream.outbox.get_nowait(), coordinator._events.get_nowait()

    with contextlib.closing(folder.lock):
        message, event = asyncio.run(blame())
    assert message.dismissal.kind == UnprocessableMessage.kind
    assert event == events.Trouble("p0", UnprocessableMessage("Joined"))


def test_a_stage_that_is_not_in_its_own_cut_is_no_registration():
    register = pb.Register(holding=pb.Holding(lineage=1, stage=2, layers_per_stage=[2, 2]))
    with pytest.raises(ValueError, match="stage"):
        peer_of("p0", register, "", (), 0.0)
    register.holding.stage = 1
    assert peer_of("p0", register, "", (), 0.0).holding.stage == 1


def test_a_checkpoint_that_does_not_fit_into_memory_ends_the_coordinator_instead_of_keeping_peers_waiting(
    tmp_path: Path,
):
    spec = make_spec(stages=2)
    folder = open_run_dir(tmp_path / "run", spec, tmp_path)

    class TooLarge:
        def cut(self, layers: tuple[int, ...]) -> None:
            raise MemoryError

    async def cutting() -> None:
        coordinator = Coordinator(corpus_of(spec), folder, print)
        coordinator._chore(coordinator._cut((2, 2), TooLarge()))  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE):
            await coordinator._over

    with contextlib.closing(folder.lock), pytest.raises(UserError) as ended:
        asyncio.run(cutting())
    assert (ended.value.kind, ended.value.exit_code) == ("memory", EXIT_OUTSIDE)
