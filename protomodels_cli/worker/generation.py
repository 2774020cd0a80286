"""A stage among its neighbours for one generation: links over both boundaries, the ways to them, and what ends with it.

Hands messages to the engine's inbox. It must not know orders, the control stream or snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protomodels_cli import timeouts
from protomodels_cli.cost.memory import in_flight_limit, least_in_flight
from protomodels_cli.protocol.messages import BadMessage
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire import troubles
from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.path import is_relayed
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker import notices
from protomodels_cli.worker.engine import Engine
from protomodels_cli.worker.links import Link
from protomodels_cli.worker.paths import Network, Way
from protomodels_cli.worker.recording import Recording
from protomodels_cli.worker.telling import Tell

GRACE = 1.0  # seconds for the coordinator to explain why a ticket is void
COMPLAIN_AT = 0.9  # of limits.link_seconds: before the coordinator gives the links up without knowing why


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
        self._links: dict[str, Link] = {}  # previous, next
        self._ways: dict[str, Way] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}  # the links open
        self._paths: dict[str, str] = {}  # as they were told
        self._linking, self.path_s = 0.0, 0.0  # since when the links are to open; seconds until the next stage's was
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counted: dict[str, int] = {}
        self._told_of_relay: dict[tuple[str, str], str | None] = {}
        self._told_of_punch: dict[str, str] = {}
        self._ended = False
        self.heard = Heard(assigned.step)
        self.done: pb.Done | None = None  # its last report
        for side, boundary in (("previous", self.stage - 1), ("next", self.stage)):
            for route in getattr(assigned, side):  # one today
                self._prepare_link(side, boundary, route)

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
        for way in self._ways.values():
            await way.close()
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

    @property
    def path(self) -> str:
        """Of the link to the next stage."""
        return self._links["next"].path if "next" in self._links else ""

    @property
    def punch(self) -> str:
        """Why that link is not punched; empty: it needs no relay, or that was not tried."""
        relayed = "next" in self._links and self._links["next"].relayed
        return self._ways["next"].punching.turns.why if relayed else ""

    # Links

    def _prepare_link(self, side: str, boundary: int, route: pb.Route) -> None:
        spec = self._spec
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
            opened=lambda path: self._tell_of_path(side, path),
        )
        self._links[side] = link
        self._ways[side] = Way(
            link,
            route,
            self._network,
            lambda path, problem: self._hear(side, path, problem),
            lambda why: self._tell_of_punch(side, why),
        )
        self._network.listener.expect(link)

    async def connect(self) -> None:
        """Open the links to both neighbours; returns when they are open."""
        self._linking = time.monotonic()
        for side in self._links:
            self._keep_open(side)
            self.own(asyncio.create_task(self._watch(side)))
        self.own(asyncio.create_task(self._complain_of_relays()))
        for link in self._links.values():
            await link.open.wait()

    async def reroute(self, routes: pb.Routes) -> None:
        """The neighbours as they are now: one may have moved."""
        for side in self._keeping if routes.generation == self.number else ():
            for route in getattr(routes, side):
                if await self._ways[side].update(route):
                    self._keeping[side].cancel()
                    self._keep_open(side)

    async def begin_anew(self) -> None:
        """This machine is in another network: no link is what it was."""
        for side, way in self._ways.items():
            await way.link.leave_stream()
            if side in self._keeping:
                self._keeping[side].cancel()
                self._keep_open(side)

    def _keep_open(self, side: str) -> None:
        self._keeping[side] = task = asyncio.create_task(self._ways[side].run())
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
            if not await _in_time(link.mended, timeouts.LINK_MEND):
                self._report(troubles.LinkBroken(link.neighbour_stage, self._ways[side].problem or ""))

    # Paths

    def _tell_of_path(self, side: str, path: str) -> None:
        """Of a link that is relayed, or no longer."""
        before, self._paths[side] = self._paths.get(side, ""), path
        if side == "next" and not self.path_s:
            self.path_s = time.monotonic() - self._linking
        stage = self._links[side].neighbour_stage
        if is_relayed(path) and path != before:
            self._tell(notices.LinkRelayed(stage, path))
        elif is_relayed(before) and not is_relayed(path):
            self._tell(notices.LinkDirect(stage, path))

    def _tell_of_punch(self, side: str, why: str) -> None:
        """Why a link stays relayed; the same once."""
        if self._told_of_punch.get(side) != why:
            self._told_of_punch[side] = why
            self._tell(notices.LinkNotPunched(self._links[side].neighbour_stage, why))

    def _hear(self, side: str, path: str, problem: str | None) -> None:
        if not self._ended:
            self.own(asyncio.create_task(self._tell_of_relay(side, path, problem)))

    async def _tell_of_relay(self, side: str, path: str, problem: str | None) -> None:
        """Tell of a relay that fails or works again, a little later: when a generation ends, its tickets are void
        before its peers hear of that. Where the link is open all the same, nobody needs to know."""
        await asyncio.sleep(GRACE)
        told = self._told_of_relay.get((side, path))
        if self._ways[side].problem_of(path) != problem or problem == told:
            return
        link = self._links[side]
        if problem is not None and link.mended.is_set():
            return
        self._told_of_relay[side, path] = problem
        stage = link.neighbour_stage
        self._tell(notices.RelayFailed(stage, problem) if problem else notices.RelayWorks(stage))

    async def _complain_of_relays(self) -> None:
        """Report why links do not open: the coordinator, which will give them up, cannot know the reason."""
        await asyncio.sleep(COMPLAIN_AT * self._spec.limits.link_seconds)
        for side, link in self._links.items():
            if (problem := self._ways[side].problem) and not link.open.is_set():
                self._report(troubles.LinkNotOpened(link.neighbour_stage, problem))
                return


async def _in_time(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
