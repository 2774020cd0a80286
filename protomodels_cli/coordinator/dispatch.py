"""The machine's orders on their way to the peers: what a stage, a turn or the first stage's token ids become as
messages. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.lanes import Lane
from protomodels_cli.coordinator.messages import (
    assignment_message,
    explanation,
    keep_message,
    paused_message,
    preparation_message,
    turn_message,
)
from protomodels_cli.coordinator.reasons import Spare
from protomodels_cli.coordinator.service import Service
from protomodels_cli.coordinator.subspace import Subspace
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

# What a crowd of spares is told can wait for whoever holds a stage: so many of them at once, and a pause.
FEW, PAUSE = 8, 0.01


class Dispatch:
    """`t_fixed`: its hash. `history`: the journal's. `called`: the name under which owners' commands find the run."""

    def __init__(
        self,
        service: Service,
        feed: Feed,
        subspace: Subspace | None,
        t_fixed: str,
        history: Callable[[], History],
        called: str,
    ):
        self._service, self._feed, self._subspace, self._history = service, feed, subspace, history
        self._routes, self._t_fixed, self._called = service.routes, t_fixed, called
        self._spares: dict[str, Spare] = {}  # peers that know that they hold nothing, and why
        self._later: dict[str, set[str]] = {}  # peer → "spare", "keep", "paused": told in its turn, as it is then
        self._fed = 0  # the last step whose ids stage 0 has

    def _to_all(self, peers: Iterable[str], **body: Any) -> None:
        for peer in peers:
            self._service.send(peer, **body)

    def explain(self, command: events.MakeSpare | events.Wait | events.Dismiss) -> None:
        """To a peer that has nothing to do now, or nothing any more. A spare that stays one hears only of another
        reason, and in its turn."""
        peer, before = command.peer, self._spares.get(command.peer)
        if isinstance(command, events.MakeSpare):
            self._spares[peer] = command.why
            if before is not None:
                if before != command.why:
                    self._tell_later(peer, "spare")
                return
        else:
            self._spares.pop(peer, None)
        if isinstance(command, events.Dismiss):
            self._service.dismiss(peer, for_good=command.exit_code != 0, **explanation(command))
        else:
            self._service.send(peer, **explanation(command))

    def keep(self, command: events.KeepSnapshots) -> None:
        self._to_all(command.holders, keep=keep_message(self._history()))
        for peer in command.others:
            self._tell_later(peer, "keep")

    def pause(self, command: events.TellPause) -> None:
        self._to_all(command.holders, paused=paused_message(command.why, self._called))
        for peer in command.others:
            self._tell_later(peer, "paused")

    def greet(self, peer: str) -> None:
        """Of a new stream: it may have parts that are not needed, or that never arrived."""
        self.forget(peer)
        self._service.send(peer, keep=keep_message(self._history()))
        if self._history().paused is not None:
            self._service.send(peer, paused=self._paused())

    def _paused(self) -> pb.Paused:
        paused = self._history().paused
        return paused_message(None if paused is None else paused.why, self._called)

    def forget(self, peer: str) -> None:
        """It is gone, or has opened another stream, on which it has not heard anything."""
        self._spares.pop(peer, None)
        self._later.pop(peer, None)

    def _tell_later(self, peer: str, what: str) -> None:
        if not self._later:
            asyncio.get_running_loop().call_later(PAUSE, self._tell_some)
        self._later.setdefault(peer, set()).add(what)

    def _tell_some(self) -> None:
        keep, paused = keep_message(self._history()), self._paused()
        for peer in list(self._later)[:FEW]:
            told = self._later.pop(peer)
            if "keep" in told:
                self._service.send(peer, keep=keep)
            if "paused" in told:
                self._service.send(peer, paused=paused)
            if "spare" in told and (why := self._spares.get(peer)) is not None:
                self._service.send(peer, **explanation(events.MakeSpare(peer, why)))
        if self._later:
            asyncio.get_running_loop().call_later(PAUSE, self._tell_some)

    def basis(self, command: events.SendBasis) -> None:
        self._to_all(command.holders, basis=self._new_basis(command.version))

    def _new_basis(self, version: int) -> pb.NewBasis:
        assert self._subspace is not None
        return pb.NewBasis(basis=self._subspace.basis_message(version))

    def assign(self, command: events.AssignStage) -> None:
        self._spares.pop(command.peer, None)
        if command.stage == 0:
            self._fed = command.step
            self._routes.renew(len(command.layers) - 1)
        assignment = assignment_message(command)
        self._add_subspace(assignment, from_seed=not command.reuse and command.restore is None)
        previous, following = self._routes.of(command.lane, command.stage)
        assignment.previous.extend(previous)
        assignment.next.extend(following)
        self._service.send(command.peer, assignment=assignment)

    def prepare(self, command: events.PrepareStage) -> None:
        self._spares.pop(command.peer, None)  # whoever is told that it stays a spare drops what it has built
        prepare = preparation_message(command)
        self._add_subspace(prepare, from_seed=not command.part.sha256)
        self._service.send(command.peer, prepare=prepare)

    def _add_subspace(self, assignment: pb.Assignment, from_seed: bool) -> None:
        if self._subspace is not None:
            assignment.t_fixed.CopyFrom(self._subspace.table_message())
            if from_seed:
                assignment.basis.CopyFrom(self._subspace.basis_message(0))

    def turn(self, command: events.SendTurn) -> None:
        self._to_all(command.lane.holders, turn=self._turn_message(command))
        self._feed_first_stage(command)
        if self._routes.are_stale:
            self._routes.sign_again()
            self._reroute(command.lane, *range(len(command.lane.holders)))

    def _turn_message(self, command: events.SendTurn | events.GoOn) -> pb.Turn:
        return turn_message(command, self._feed.microbatches, self._feed.evaluation_microbatches, self._t_fixed)

    def _reroute(self, lane: Lane, *stages: int) -> None:
        for stage in stages:
            previous, following = self._routes.of(lane, stage)
            routes = pb.Routes(generation=lane.generation, previous=previous, next=following)
            self._service.send(lane.holders[stage], routes=routes)

    def go_on(self, command: events.GoOn) -> None:
        """What it knows already it passes over."""
        peer, stage, lane = command.peer, command.stage, command.lane
        self._service.send(peer, turn=self._turn_message(command))
        self._reroute(lane, *range(max(0, stage - 1), min(stage + 2, len(lane.holders))))  # it may have moved
        if command.new_basis is not None:
            self._service.send(peer, basis=self._new_basis(command.new_basis))
        if stage == 0:
            self._fed = command.step  # what was fed ahead may be lost too
            self._feed_first_stage(command)

    def _feed_first_stage(self, command: events.SendTurn | events.GoOn) -> None:
        """The task's ids, and the next step's ahead of its turn."""
        first, task = command.lane.holders[0], command.task
        if task is None:
            return
        if task.kind == "evaluation":
            for feed in self._feed.evaluation(task.step):
                self._service.send(first, feed=feed)
        if task.kind == "step":
            for step in range(max(self._fed + 1, task.step), min(task.step + 1, self._feed.steps) + 1):
                for feed in self._feed.step(step):
                    self._service.send(first, feed=feed)
                self._fed = step
