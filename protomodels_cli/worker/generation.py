"""A stage among its neighbours for one generation: links over both boundaries, the ways to them, and what ends with it.

Hands messages to the engine's inbox. It must not know orders, the control stream or snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from protomodels_cli.cost.memory import in_flight_limit, least_in_flight
from protomodels_cli.observe.logs import WIRE
from protomodels_cli.protocol.messages import BadMessage
from protomodels_cli.retry import Backoff
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire import troubles
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.join_link import Address
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.relay import RelayedAcceptor, RelayedDialler
from protomodels_cli.wire.tls import Identity
from protomodels_cli.worker import notices
from protomodels_cli.worker.engine import Engine
from protomodels_cli.worker.links import Link, Listener, dial
from protomodels_cli.worker.recording import Recording
from protomodels_cli.worker.telling import Tell

GRACE = 1.0  # seconds for the coordinator to explain why a ticket is void
DETOUR_SECONDS = 3.0  # for a stream to open before it is tried the other way: through the relay, directly again
MEND_SECONDS = 10.0  # for a broken link to be open again before the coordinator hears of it, then as often
REDIAL = 0.2, 2.0  # seconds between tries: at first, at most
COMPLAIN_AT = 0.9  # of limits.link_seconds: before the coordinator gives the links up without knowing why


@dataclass(frozen=True)
class Network:
    """What all generations of one peer share. It must not know any of them."""

    identity: Identity
    listener: Listener
    door: Callable[[], Address]  # the coordinator's, where relayed links meet
    connection: Connection | None  # where a slow one is emulated


@dataclass
class Heard:
    """What the coordinator has said in a generation. After a broken session it says some of it again."""

    decided: int  # the last step whose outcome is known
    task: int = 0
    fed: dict[bool, tuple[int, int]] = field(default_factory=dict)  # evaluation? → step, microbatch of the last ids

    def is_news(self, feed: pb.Feed) -> bool:
        """Token ids come in order, for steps and for evaluations, and in that order again."""
        here, before = (feed.step, feed.microbatch), self.fed.get(feed.evaluation, (-1, -1))
        self.fed[feed.evaluation] = max(here, before)
        return here > before


class Generation:
    """From its assignment until the next one, or until this peer holds no stage. It must not know what came before.

    `report` takes what is wrong with a neighbour, while this generation lasts."""

    def __init__(
        self,
        assigned: pb.Assignment,
        spec: RunSpec,
        network: Network,
        engine: Engine,
        report: Callable[[troubles.WithNeighbour], None],
        tell: Tell,
        recording: Recording | None = None,
    ):
        self.recording = recording  # of the messages of steps that may be audited
        self.number, self.stage, self.stages = assigned.generation, assigned.stage, len(assigned.layers_per_stage)
        self._spec, self._network, self._engine, self._report, self._tell = spec, network, engine, report, tell
        self._routes: dict[str, pb.Route] = {}  # previous, next
        self._links: dict[str, Link] = {}
        self._relays: dict[str, RelayedAcceptor | RelayedDialler] = {}
        self._local_ports: dict[str, int] = {}  # of the diallers among them
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counted: dict[str, int] = {}
        self._told_of_relay: dict[str, str | None] = {}
        self._ended = False
        self.heard = Heard(assigned.step)
        self.done: pb.Done | None = None  # its last report
        for side, boundary in (("previous", self.stage - 1), ("next", self.stage)):
            for route in getattr(assigned, side):  # one today
                self._routes[side] = route
                self._prepare_link(side, boundary)

    def own(self, task: asyncio.Task[Any]) -> None:
        """Cancel this task when the generation ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """End the generation: nothing of it goes in or out any more."""
        self._ended = True
        self._network.listener.forget()
        for link in self._links.values():
            link.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for relay in self._relays.values():
            await relay.close()
        if self.recording is not None:
            self.recording.end()

    # Messages

    def begin(self, step: pb.Step) -> None:
        if self.recording is not None:
            self.recording.begin(step.step, step.record)

    def _deliver(self, message: Message) -> None:
        if self.recording is not None:
            self.recording.note("in", message)
        self._engine.deliver(message)

    def send(self, message: Message) -> None:
        if self.recording is not None:
            self.recording.note("out", message)
        self._links["previous" if message.leg == "backward" else "next"].send(message)

    def take(self, leg: str) -> None:
        """Give credit for a message of this leg, which is being computed with."""
        side = "next" if leg == "backward" else "previous"
        if side in self._links:  # token ids come without a link
            self._links[side].take()

    @property
    def sending(self) -> bool:
        return any(link.sending for link in self._links.values())

    def sent_since(self, side: str, leg: str) -> int:
        """Bytes sent since the last report."""
        total = self._links[side].bytes_sent[leg] if side in self._links else 0
        before, self._counted[leg] = self._counted.get(leg, 0), total
        return total - before

    @property
    def refused_frames(self) -> int:
        return sum(link.refused for link in self._links.values())

    @property
    def round_trip_s(self) -> float:
        """To the next stage and back; 0: not known."""
        return self._links["next"].round_trip if "next" in self._links else 0.0

    # Links

    def _prepare_link(self, side: str, boundary: int) -> None:
        spec, route = self._spec, self._routes[side]
        tokens = (spec.batch.size // spec.batch.microbatches) * (spec.model.context + 1)
        link = Link(
            generation=self.number,
            boundary=boundary,
            neighbour=route.peer,
            to_next=side == "next",
            window=in_flight_limit(spec, self.stages - 1 - boundary),
            # A sender may hold fewer than the window, as its memory allows, but never fewer than it must.
            credit_every=max(1, least_in_flight(spec, self.stages - 1 - boundary) // 2),
            most_bytes=1024 + tokens * (8 * spec.boundary_width + 8),
            deliver=self._deliver,
            has_sent=self._engine.has_sent,
            credited=self._engine.next_has_taken if side == "next" else lambda messages: None,
            connection=self._network.connection,
            allocate=self._engine.allocate,
        )
        self._links[side] = link
        self._network.listener.expect(link)
        if route.way == pb.Route.RELAY_LISTEN:
            self._accept_relayed(side)

    async def connect(self) -> None:
        """Open the links to both neighbours; returns when they are open."""
        for side, link in self._links.items():
            dials = self._routes[side].way in (pb.Route.DIAL, pb.Route.RELAY_DIAL)
            self._serve(side, self._keep_dialling(side) if dials else self._wait_for_end(link))
            self.own(asyncio.create_task(self._watch(side)))
            if self._routes[side].way == pb.Route.LISTEN:
                self.own(asyncio.create_task(self._wait_for_detour(side)))
        self.own(asyncio.create_task(self._complain_of_relays()))
        for link in self._links.values():
            await link.open.wait()

    async def _keep_dialling(self, side: str) -> None:
        """Open one stream after another, until the generation ends or the neighbour sends what it may not. Where one
        does not open directly, the next is tried through the relay, and the one after that directly again."""
        link, backoff, route = self._links[side], Backoff(*REDIAL), self._routes[side]
        relayed = only_relayed = route.way == pb.Route.RELAY_DIAL
        while not link.closed.is_set():
            before = link.streams
            try:
                where = await self._relayed_address(side) if relayed else (route.host, route.port)
                detour = notices.LinkRelayed(link.neighbour_stage) if relayed and not only_relayed else None
                await self._dial(side, where, None if only_relayed else DETOUR_SECONDS, detour)
            except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError, OSError) as error:
                WIRE.debug("the link to stage %d broke: %s", link.neighbour_stage, error)
            if link.streams > before:
                backoff.reset()
            else:
                relayed = only_relayed or not relayed
            wait = backoff.after_failure(time.monotonic())
            assert wait is not None, "the generation ends it"
            await asyncio.sleep(wait)
        await self._wait_for_end(link)

    async def _dial(self, side: str, where: Address, limit: float | None, once_open: notices.Notice | None) -> None:
        """Serve a stream until it breaks, unless it has not opened after so many seconds."""
        link = self._links[side]
        dialling = asyncio.create_task(dial(link, *where, self._network.identity))
        opened = asyncio.create_task(link.mended.wait())
        try:
            await asyncio.wait({dialling, opened}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if opened.done() and once_open is not None:
                self._tell(once_open)
            if opened.done() or dialling.done():
                await dialling
        finally:
            for task in (dialling, opened):
                task.cancel()
            await asyncio.gather(dialling, opened, return_exceptions=True)

    async def _relayed_address(self, side: str) -> Address:
        """The port here that leads to the neighbour through the relay."""
        if side not in self._relays:
            dialler = RelayedDialler(self._network.door(), self._routes[side].ticket, self._hears_of(side))
            self._local_ports[side] = await dialler.open()
            self._relays[side] = dialler
        return "127.0.0.1", self._local_ports[side]

    def _accept_relayed(self, side: str) -> None:
        here = "127.0.0.1", self._network.listener.port
        acceptor = RelayedAcceptor(self._network.door(), self._routes[side].ticket, here, self._hears_of(side))
        acceptor.start()
        self._relays[side] = acceptor

    async def _wait_for_detour(self, side: str) -> None:
        """Once the neighbour has not come, or not come back, for a while, wait for it at the relay as well."""
        link = self._links[side]
        while await _in_time(link.mended, DETOUR_SECONDS):
            await link.broken.wait()
        self._accept_relayed(side)

    async def _wait_for_end(self, link: Link) -> None:
        await link.closed.wait()
        if link.error is not None:
            raise link.error

    def _serve(self, side: str, serving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(serving)
        self.own(task)
        task.add_done_callback(lambda t: self._link_ended(side, t))

    def _link_ended(self, side: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._ended:
            return
        if isinstance(error := task.exception(), BadMessage):
            self._report(troubles.InvalidInput(self._links[side].neighbour_stage, str(error)))
        elif error is not None:
            raise error

    async def _watch(self, side: str) -> None:
        """Report a link that stays broken. The coordinator may know why, and what to do about it."""
        link = self._links[side]
        await link.open.wait()
        while True:
            await link.broken.wait()
            if not await _in_time(link.mended, MEND_SECONDS):
                relay = self._relays.get(side)
                detail = relay.problem or "" if relay is not None else ""
                self._report(troubles.LinkBroken(link.neighbour_stage, detail))

    # Relays

    def _hears_of(self, side: str) -> Callable[[str | None], None]:
        def hear(problem: str | None) -> None:
            if not self._ended:
                self.own(asyncio.create_task(self._tell_of_relay(side, problem)))

        return hear

    async def _tell_of_relay(self, side: str, problem: str | None) -> None:
        """Tell of a relay that fails or works again, a little later: when a generation ends, its tickets are void
        before its peers hear of that."""
        await asyncio.sleep(GRACE)
        if self._relays[side].problem == problem != self._told_of_relay.get(side):
            self._told_of_relay[side] = problem
            stage = self._links[side].neighbour_stage
            self._tell(notices.RelayFailed(stage, problem) if problem else notices.RelayWorks(stage))

    async def _complain_of_relays(self) -> None:
        """Report why links do not open: the coordinator, which will give them up, cannot know the reason."""
        await asyncio.sleep(COMPLAIN_AT * self._spec.limits.link_seconds)
        for side, relay in self._relays.items():
            link = self._links[side]
            if relay.problem and not link.open.is_set():
                self._report(troubles.LinkNotOpened(link.neighbour_stage, relay.problem))
                return


async def _in_time(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
