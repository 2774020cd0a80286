"""The machine's orders on their way to the peers: what a stage, a turn or the first stage's token ids become as
messages. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.history import History
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
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.subspace import Subspace
from protomodels_cli.coordinator.work import Task
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

# What a crowd of spares is told can wait for whoever holds a stage: so many of them at once, and a pause.
FEW, PAUSE = 8, 0.01


class Dispatch:
    def __init__(self, service: Service, feed: Feed, subspace: Subspace | None, history: Callable[[], History]):
        self._service, self._feed, self._subspace, self._history = service, feed, subspace, history
        self._routes = service.routes
        self._spares: dict[str, Spare] = {}  # peers that know that they hold nothing, and why
        self._later: dict[str, set[str]] = {}  # peer → "spare", "keep", "paused": told in its turn, as it is then
        self._paused = pb.Paused()
        self._fed = 0  # the last step whose ids stage 0 has

    def _to_holders(self, state: State, **body: Any) -> None:
        for peer in state.history.holders:
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

    def keep(self, state: State) -> None:
        """Tell all peers which snapshots are needed."""
        self._to_holders(state, keep=keep_message(state.history))
        holders = set(state.history.holders)
        for peer in state.peers:
            if peer not in holders:
                self._tell_later(peer, "keep")

    def pause(self, state: State) -> None:
        """Tell all peers that the run is paused, or goes on."""
        self._paused = paused_message(state)
        self._to_holders(state, paused=self._paused)
        holders = set(state.history.holders)
        for peer in state.peers:
            if peer not in holders:
                self._tell_later(peer, "paused")

    def greet(self, state: State, peer: str) -> None:
        """Of a new stream: it may have parts that are not needed, or that never arrived."""
        self.forget(peer)
        self._service.send(peer, keep=keep_message(self._history()))
        if state.history.paused is not None:
            self._service.send(peer, paused=paused_message(state))

    def forget(self, peer: str) -> None:
        """It is gone, or has opened another stream, on which it has not heard anything."""
        self._spares.pop(peer, None)
        self._later.pop(peer, None)

    def _tell_later(self, peer: str, what: str) -> None:
        if not self._later:
            asyncio.get_running_loop().call_later(PAUSE, self._tell_some)
        self._later.setdefault(peer, set()).add(what)

    def _tell_some(self) -> None:
        keep = keep_message(self._history())
        for peer in list(self._later)[:FEW]:
            told = self._later.pop(peer)
            if "keep" in told:
                self._service.send(peer, keep=keep)
            if "paused" in told:
                self._service.send(peer, paused=self._paused)
            if "spare" in told and (why := self._spares.get(peer)) is not None:
                self._service.send(peer, **explanation(events.MakeSpare(peer, why)))
        if self._later:
            asyncio.get_running_loop().call_later(PAUSE, self._tell_some)

    def basis(self, state: State, version: int) -> None:
        assert self._subspace is not None
        self._to_holders(state, basis=pb.NewBasis(basis=self._subspace.basis_message(version)))

    def assign(self, state: State, command: events.AssignStage) -> None:
        self._spares.pop(command.peer, None)
        stage, history = command.stage, state.history
        if stage == 0:
            self._fed = history.step
            self._routes.renew(state.stages - 1)
        assignment = assignment_message(state, stage, command.task, command.reuse)
        self._add_subspace(assignment, history)
        previous, following = self._routes.of(state, stage)
        assignment.previous.extend(previous)
        assignment.next.extend(following)
        self._service.send(command.peer, assignment=assignment)

    def _add_subspace(self, assignment: pb.Assignment, history: History) -> None:
        if self._subspace is not None:
            assignment.t_fixed.CopyFrom(self._subspace.table_message())
            if not assignment.reuse and not history.newest.parts:
                assignment.basis.CopyFrom(self._subspace.basis_message(0))

    def prepare(self, state: State, command: events.PrepareStage) -> None:
        self._spares.pop(command.peer, None)  # whoever is told that it stays a spare drops what it has built
        prepare = preparation_message(state, command.peer, command.part.stage)
        self._add_subspace(prepare, state.history)
        self._service.send(command.peer, prepare=prepare)

    def turn(self, state: State, command: events.SendTurn) -> None:
        task = command.task
        turn = turn_message(state, command.decision, task, command.save, self._feed.evaluation_microbatches)
        self._to_holders(state, turn=turn)
        if task is not None:
            self._feed_first_stage(state, task)
        if self._routes.are_stale:
            self._routes.sign_again()
            self._reroute(state, *range(state.stages))

    def _reroute(self, state: State, *stages: int) -> None:
        for stage in stages:
            previous, following = self._routes.of(state, stage)
            routes = pb.Routes(generation=state.history.generation, previous=previous, next=following)
            self._service.send(state.history.holders[stage], routes=routes)

    def go_on(self, state: State, peer: str) -> None:
        """All that a holder may have missed while it had no session; what it knows already it passes over."""
        history, task, stage = state.history, state.task, state.history.holders.index(peer)
        decision = None if state.undelivered else history.decision
        save = any(mark.step == history.step for mark in history.pending)
        microbatches = self._feed.evaluation_microbatches
        self._service.send(peer, turn=turn_message(state, decision, task, save, microbatches))
        self._reroute(state, *range(max(0, stage - 1), min(stage + 2, state.stages)))  # it may have moved
        if history.next_basis is not None and stage not in state.took_basis:
            assert self._subspace is not None
            basis = pb.NewBasis(basis=self._subspace.basis_message(history.next_basis.version))
            self._service.send(peer, basis=basis)
        if stage == 0:
            self._fed = history.step  # what was fed ahead may be lost too
            if task is not None:
                self._feed_first_stage(state, task)

    def _feed_first_stage(self, state: State, task: Task) -> None:
        """This task's ids, and the next step's ahead of its turn."""
        first = state.history.holders[0]
        if task.kind == "evaluation":
            for feed in self._feed.evaluation(task.step):
                self._service.send(first, feed=feed)
        if task.kind == "step":
            for step in range(max(self._fed + 1, task.step), min(task.step + 1, state.spec.steps) + 1):
                for feed in self._feed.step(step):
                    self._service.send(first, feed=feed)
                self._fed = step
