"""A peer and a coordinator that goes away: how it ends, what it says of its links, what limits it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from conftest import make_spec
from machine_bench import BROKEN, Bench
from waiting import PATIENCE, until

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.reasons import TooSlow
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, UserError
from protomodels_cli.wire import troubles
from protomodels_cli.wire.client import Line, Refused
from protomodels_cli.wire.join_link import JoinLink, UnreachableError
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_authority, peer_name
from protomodels_cli.worker import device as devices
from protomodels_cli.worker import join as joining
from protomodels_cli.worker import notices, problems
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.control import ConnectFailed
from protomodels_cli.worker.device import computation_of
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.papers import Papers
from protomodels_cli.worker.session import Session
from protomodels_cli.worker.telling import PeerError

IDENTITY = new_authority().issue_with_key(peer_name("p"))


class Silent(rpc.PeeringServicer):
    """A coordinator that has no stage to give, and lets nobody go."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def Session(self, request_iterator: Any, context: Any) -> Any:
        yield pb.CoordinatorMessage(number=1, spare=pb.Spare(why="all stages have a holder"))
        async for message in request_iterator:
            self.heard.append(message.WhichOneof("body"))


def with_a_session(
    folder: Path,
    story: Callable[[Session, asyncio.Task[int], Silent, Callable[[], Awaitable[None]]], Awaitable[None]],
    give_up_after: float = 3600.0,
) -> list[notices.Notice]:
    """Tell the story of a session and its coordinator, which goes when the story says so. Returns what was told."""
    told: list[notices.Notice] = []

    async def run() -> None:
        server, coordinator = grpc.aio.server(), Silent()
        rpc.add_PeeringServicer_to_server(coordinator, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        spec = make_spec(limits={"lease_seconds": 1.0})
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            session = Session(
                spec,
                Cards.of([torch.device("cpu")], spec),
                Papers(IDENTITY, ()),
                Listener(IDENTITY),
                Line([("127.0.0.1", port)], lambda where: channel),
                folder,
                told.append,
                give_up_after,
            )

            async def introduce() -> pb.Register:
                return pb.Register()

            running = asyncio.create_task(session.run(introduce))
            await until(lambda: session._control.connected or running.done())
            try:
                async with asyncio.timeout(PATIENCE):
                    await story(session, running, coordinator, lambda: server.stop(None))
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError, UserError):
                    await running
                await server.stop(None)

    asyncio.run(run())
    return told


# Ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_a_peer_whose_coordinator_is_gone(tmp_path: Path, number: int):
    before = signal.signal(number, lambda *_: None)
    after: list[Any] = []

    async def story(session: Session, running: asyncio.Task[int], coordinator: Silent, go: Any) -> None:
        await go()
        await until(lambda: not session._control.connected)
        os.kill(os.getpid(), number)
        assert await running == EXIT_INTERRUPTED
        after.append(signal.getsignal(number))

    try:
        ours = signal.getsignal(number)
        told = with_a_session(tmp_path, story)
    finally:
        signal.signal(number, before)
    assert after == [ours], "whoever comes after the session hears the next one"
    assert notices.LeavingAtOnce() in told
    [lost] = [notice for notice in told if isinstance(notice, notices.ConnectionLost)]
    assert lost.stage is None


def test_a_peer_that_asked_to_leave_does_not_wait_for_a_coordinator_that_then_goes(tmp_path: Path):
    async def story(session: Session, running: asyncio.Task[int], coordinator: Silent, go: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: "leaving" in coordinator.heard)
        assert not running.done(), "the coordinator has the last word"
        await go()
        assert await running == EXIT_INTERRUPTED

    told = with_a_session(tmp_path, story)
    assert notices.LeavingAfterStep() in told


def test_a_peer_gives_up_after_the_time_it_was_given(tmp_path: Path):
    async def story(session: Session, running: asyncio.Task[int], coordinator: Silent, go: Any) -> None:
        await go()
        started = time.monotonic()
        with pytest.raises(PeerError) as caught:
            await running
        assert caught.value.problem == problems.GaveUp(1.0)
        assert caught.value.exit_code == EXIT_OUTSIDE
        assert time.monotonic() - started > 0.9

    with_a_session(tmp_path, story, give_up_after=1.0)


class Mute(rpc.PeeringServicer):
    """A coordinator that says nothing: it hangs up after this many seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    async def Session(self, request_iterator: Any, context: Any) -> Any:
        await anext(aiter(request_iterator))  # or the peer sees a write that failed
        await asyncio.sleep(self._seconds)
        return
        yield  # what makes it a stream


@pytest.mark.parametrize(("seconds", "reason"), [(0.0, problems.ConnectionClosed()), (60.0, problems.NoHeartbeat(1.5))])
def test_a_first_connection_that_ends_before_a_word_is_a_problem_with_a_fix_and_no_bug(
    tmp_path: Path, seconds: float, reason: problems.Loss
):
    async def story() -> None:
        server = grpc.aio.server()
        rpc.add_PeeringServicer_to_server(Mute(seconds), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        spec = make_spec(limits={"lease_seconds": 1.0})
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            line, cpu = Line([("127.0.0.1", port)], lambda where: channel), Cards.of([torch.device("cpu")], spec)
            told: list[notices.Notice] = []
            session = Session(spec, cpu, Papers(IDENTITY, ()), Listener(IDENTITY), line, tmp_path, told.append, 60.0)

            async def introduce() -> pb.Register:
                return pb.Register()

            with pytest.raises(ConnectFailed) as caught:
                await session.run(introduce)
        assert isinstance(caught.value, UnreachableError), "join tries again where it would for an unreachable one"
        assert caught.value.problem == problems.NeverConnected(reason)
        assert caught.value.exit_code == EXIT_OUTSIDE
        await server.stop(None)

    asyncio.run(story())


class Forgetful(rpc.PeeringServicer):
    """A coordinator that hangs up after a word, and then denies having known the peer."""

    def __init__(self) -> None:
        self.knows = True

    async def CheckReachability(self, request: pb.ReachabilityRequest, context: Any) -> pb.ReachabilityReply:
        if not self.knows:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "who are you\njoin again")
        return pb.ReachabilityReply()

    async def Session(self, request_iterator: Any, context: Any) -> Any:
        self.knows = False
        await anext(aiter(request_iterator))  # or the peer sees a write that failed
        yield pb.CoordinatorMessage(number=1, spare=pb.Spare(why="all stages have a holder"))


def test_a_refusal_ends_a_peer_also_when_it_reconnects(tmp_path: Path):
    async def story() -> None:
        server = grpc.aio.server()
        rpc.add_PeeringServicer_to_server(Forgetful(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            line = Line([("127.0.0.1", port)], lambda where: channel)
            cpu, told = Cards.of([torch.device("cpu")], make_spec()), list[notices.Notice]()
            papers = Papers(IDENTITY, ())
            session = Session(make_spec(), cpu, papers, Listener(IDENTITY), line, tmp_path, told.append, 60.0)

            async def introduce() -> pb.Register:
                await line.CheckReachability(pb.ReachabilityRequest())
                return pb.Register()

            with pytest.raises(Refused):
                async with asyncio.timeout(PATIENCE):
                    await session.run(introduce)
        assert notices.ConnectionLost in map(type, told), "it was in"
        await server.stop(None)

    asyncio.run(story())


def test_who_was_in_a_run_before_looks_for_its_coordinator_as_long_as_it_was_told_to(tmp_path: Path, unused_port: int):
    """And whoever was not hears at once that nobody is there."""
    link = JoinLink("127.0.0.1", unused_port, "t" * 22, "f" * 43)
    options = joining.Options(link, ("cpu",), "me", tmp_path, 0, give_up_after=1.0)
    said: list[str] = []
    with pytest.raises(UnreachableError):
        asyncio.run(joining.join(options, said.append))
    assert said == []
    (tmp_path / f"run-{link.fingerprint[:8]}").mkdir()
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        asyncio.run(joining.join(options, said.append))
    assert caught.value.problem == problems.GaveUp(1.0)
    assert time.monotonic() - started > 0.9
    assert len(said) == 1, "that it waits"


@pytest.mark.parametrize("reachable", [True, False])
def test_whoever_has_a_mapped_port_is_told_which_port_means_what(reachable: bool):
    """Reached: the router's. To be forwarded by hand, and kept with --port: the one that it listens at."""

    class Stub:
        async def CheckReachability(self, *_: Any, **__: Any) -> pb.ReachabilityReply:
            return pb.ReachabilityReply(reachable=reachable, host="198.51.100.1", reason="no answer")

    request = pb.ReachabilityRequest(port=42707, outside_port=7421, outside_host="198.51.100.1")
    found, _ = asyncio.run(joining._reachability(Stub(), (), request, None))  # type: ignore[arg-type]
    not_reachable = notices.NotReachable("198.51.100.1", 42707, "no answer")
    assert found == (notices.Reachable("198.51.100.1:7421") if reachable else not_reachable)


# Limits


def test_a_device_that_is_at_one_work_for_too_long_is_noticed_and_a_busy_one_is_not():
    numbers = iter(range(1, 10**6))

    async def busy() -> None:
        async with asyncio.timeout(0.5):
            await devices.watch(lambda: next(numbers), 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(busy())
    with pytest.raises(PeerError) as caught:
        asyncio.run(devices.watch(lambda: 7, 0.1))
    assert caught.value.problem == troubles.DeviceStuck(0.1)

    async def idle() -> None:
        async with asyncio.timeout(0.5):
            await devices.watch(lambda: 0, 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(idle())


def test_a_refusal_for_want_of_memory_names_what_limits_it(monkeypatch):
    spec, cpu = make_spec(), [torch.device("cpu")]
    with pytest.raises(PeerError) as caught:
        joining._check_memory(spec, Cards.of(cpu, spec, 1000), 1000)
    low = caught.value.problem
    assert isinstance(low, problems.MemoryOptionTooLow)
    assert low.allowed == 1000 < low.need < low.free
    joining._check_memory(spec, Cards.of(cpu, spec, 1 << 29), 1 << 29)
    assert Cards.of(cpu, spec, 1 << 29).offered == 1 << 29
    monkeypatch.setattr(devices, "free_memory", lambda device: 2000)
    for most in (None, 1000):  # a higher one would not help
        with pytest.raises(PeerError) as caught:
            joining._check_memory(spec, Cards.of(cpu, spec, most), most)
        assert caught.value.problem == problems.DeviceTooSmall("cpu", 2000, low.need)


def test_what_codecs_keep_on_the_host_is_checked_there_and_counts_on_a_cpu(monkeypatch):
    compute = {"dtype": "float32", "compile": "never"}
    spec = make_spec(steps=5000, wire={"forward": "int8+aqsgd"}, compute=compute)
    sizes, computation = StageMemory(spec), computation_of(spec, torch.device("cpu"))
    on_device = min(sizes.total(i, i + 1, 3 - i, computation) for i in range(4))
    on_host = min(sizes.on_host(i, i + 1) for i in range(4))
    both = min(sizes.total(i, i + 1, 3 - i, computation) + sizes.on_host(i, i + 1) for i in range(4))
    monkeypatch.setattr(devices, "free_memory", lambda device: on_device)
    cpu, gpu = (Cards.of([torch.device(name)], spec) for name in ("cpu", "cuda"))
    with pytest.raises(PeerError) as caught:
        joining._check_memory(spec, cpu, None)
    assert caught.value.problem == problems.DeviceTooSmall("cpu", on_device, both)
    assert joining._check_host_memory(spec, cpu) is None
    monkeypatch.setattr(devices, "host_memory", lambda device: on_host)
    joining._check_memory(spec, gpu, None)
    assert joining._check_host_memory(spec, gpu) == on_host
    monkeypatch.setattr(devices, "host_memory", lambda device: on_host - 1)
    with pytest.raises(PeerError) as caught:
        joining._check_host_memory(spec, gpu)
    assert caught.value.problem == problems.HostTooSmall(on_host - 1, on_host)


@pytest.mark.parametrize(("doing", "seconds"), [("build", 10), ("reuse", 20), ("link", 30)])
def test_every_wait_for_a_stage_to_be_ready_has_a_limit_of_its_own(doing: str, seconds: int):
    limits = {"build_seconds": 10.0, "reuse_seconds": 20.0, "link_seconds": 30.0}
    b = Bench(make_spec(stages=2, steps=8, limits=limits))
    b.join(0, 1)
    if doing == "reuse":
        while b.state.history.step < 2:
            b.answer()
        b.tell(ev.Trouble("p0", BROKEN, 1, 1))
    elif doing == "link":
        b.answer()
    started = b.state.task.started
    assert b.state.task.kind == ("link" if doing == "link" else "build")
    b.done(0)
    b.now = started + seconds - 1
    assert not any(isinstance(c, ev.Dismiss) for c in b.tell(ev.Tick()))
    b.now = started + seconds
    [dismissed] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.Dismiss)]
    assert dismissed.peer == "p1"
    assert dismissed.why == TooSlow(1, doing, seconds)
