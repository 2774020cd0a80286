"""A peer whose words break the machine goes; the coordinator stays."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import corpus_of, make_spec
from machine_bench import peer
from waiting import PATIENCE

from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts, MessagesDiffer
from protomodels_cli.coordinator.coordinator import Coordinator
from protomodels_cli.coordinator.messages import peer_of
from protomodels_cli.coordinator.reasons import AllStagesHeld, ConnectionClosed, PeerReport, UnprocessableMessage
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.service import ControlStream, EnrolledPeer
from protomodels_cli.errors import EXIT_OUTSIDE, UserError
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.troubles import LinkBroken


def test_a_registration_that_breaks_the_machine_costs_the_peer_its_session_and_no_more(tmp_path: Path):
    spec = make_spec(stages=2)
    folder = open_run_dir(tmp_path / "run", spec, tmp_path)

    async def blame() -> tuple[pb.CoordinatorMessage, events.Event]:
        coordinator = Coordinator(corpus_of(spec), folder, print)
        stream = ControlStream()
        coordinator._service._enrolled["p0"] = EnrolledPeer(0.0, stream=stream, unannounced=1)
        coordinator._blame(events.Joined(peer(0)), RuntimeError("a bug"))
        return stream.outbox.get_nowait(), coordinator._events.get_nowait()

    with contextlib.closing(folder.lock):
        message, event = asyncio.run(blame())
    assert message.dismissal.kind == UnprocessableMessage.kind
    assert event == events.Trouble("p0", UnprocessableMessage("Joined"))


BUG = RuntimeError("a bug")


def blamed(tmp_path: Path, *raising: events.Event) -> tuple[list[events.Event], BaseException | None]:
    """What a coordinator submits to itself when these events raise in turn, and the error that ends it."""
    spec = make_spec(stages=2)
    folder = open_run_dir(tmp_path / "run", spec, tmp_path)

    async def blame() -> tuple[list[events.Event], BaseException | None]:
        coordinator = Coordinator(corpus_of(spec), folder, print)
        for event in raising:
            coordinator._blame(event, BUG)
        submitted = [coordinator._events.get_nowait() for _ in range(coordinator._events.qsize())]
        return submitted, coordinator._over.exception() if coordinator._over.done() else None

    with contextlib.closing(folder.lock):
        return asyncio.run(blame())


@pytest.mark.parametrize(
    "event",
    [
        events.Leaving("p0"),
        events.Trouble("p0", PeerReport(LinkBroken(1)), 1, 1),  # the accused stays
        events.Left("p0", ConnectionClosed()),
    ],
)
def test_only_the_sender_of_an_event_that_raises_is_dismissed(tmp_path, event):
    fault = events.Trouble("p0", UnprocessableMessage(type(event).__name__))
    assert blamed(tmp_path, event, event) == ([fault, fault], None)


@pytest.mark.parametrize(
    "found", [MessagesDiffer(3, 0), AuditFailed(0, 3, "forward", 5, 10, ("peer-9",)), FalseVerdicts(2, 4)]
)
def test_an_audit_that_breaks_the_machine_costs_nobody_anything(tmp_path, found):
    assert blamed(tmp_path, events.Trouble("p0", found, 1, 1)) == ([], None)


@pytest.mark.parametrize(
    "event", [events.Tick(), events.PauseRun(), events.Trouble("p0", UnprocessableMessage("Leaving"))]
)
def test_a_fault_without_a_sender_ends_the_run_with_a_sentence(tmp_path, event):
    submitted, error = blamed(tmp_path, event)
    assert submitted == []
    assert isinstance(error, UserError)
    assert (error.kind, error.exit_code) == ("own_fault", EXIT_OUTSIDE)


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
        coordinator.spawn(coordinator._cut((2, 2), TooLarge()))  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE):
            await coordinator._over

    with contextlib.closing(folder.lock), pytest.raises(UserError) as ended:
        asyncio.run(cutting())
    assert (ended.value.kind, ended.value.exit_code) == ("memory", EXIT_OUTSIDE)


def test_what_follows_from_an_event_fails_for_its_sender_alone(tmp_path: Path):
    """A notice that cannot be told, say: the other commands are carried out all the same."""
    spec = make_spec(stages=2)
    folder = open_run_dir(tmp_path / "run", spec, tmp_path)

    async def follow() -> tuple[pb.CoordinatorMessage, events.Event, bool]:
        coordinator = Coordinator(corpus_of(spec), folder, print)
        stream = ControlStream()
        coordinator._service._enrolled["p1"] = EnrolledPeer(0.0, stream=stream)
        untold, spare = events.Tell(cast(Any, "no notice")), events.MakeSpare("p1", AllStagesHeld(2))
        coordinator._follow(events.Rests("p0", None), [untold, spare])
        return stream.outbox.get_nowait(), coordinator._events.get_nowait(), coordinator._over.done()

    with contextlib.closing(folder.lock):
        message, event, over = asyncio.run(follow())
    assert message.WhichOneof("body") == "spare"
    assert event == events.Trouble("p0", UnprocessableMessage("Rests"))
    assert not over
