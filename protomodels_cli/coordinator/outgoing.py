"""This makes the commands to peers, with all that a message needs, from the state at the moment of the decision. Pure.

`dispatch.py` turns them into messages later, and reads no state."""

from __future__ import annotations

from protomodels_cli.coordinator.events import (
    AssignStage,
    GoOn,
    KeepSnapshots,
    PrepareStage,
    SendBasis,
    SendTurn,
    TellPause,
)
from protomodels_cli.coordinator.history import Decided
from protomodels_cli.coordinator.lanes import Lane
from protomodels_cli.coordinator.sharing import share_of
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Task
from protomodels_cli.protocol.parts import Part


def lane(state: State) -> Lane:
    holders = state.history.holders
    return Lane(state.history.generation, holders, tuple(map(state.peers.get, holders)), state.home)


def assign(state: State, stage: int, task: Task, reuse: bool) -> AssignStage:
    history = state.history
    mark = history.newest
    return AssignStage(
        peer=history.holders[stage],
        stage=stage,
        task=task.number,
        reuse=reuse,
        lane=lane(state),
        layers=history.layers,
        lineage=history.lineage,
        step=history.step,
        owed=(state.owed or 0) if stage == len(history.layers) - 1 else 0,
        memory=share_of(state.spec, state.peers, history.layers, history.holders, stage),
        decision=history.decision if reuse else None,
        restore=mark.as_parts()[stage] if mark.parts and not reuse else None,
    )


def prepare(state: State, peer: str, part: Part) -> PrepareStage:
    """What this peer would be assigned, had the run gone back to that part's snapshot for it."""
    history = state.history
    holders = [peer if stage == part.stage else holder for stage, holder in enumerate(history.holders)]
    memory = share_of(state.spec, state.peers, history.layers, holders, part.stage)
    return PrepareStage(peer, part, history.layers, memory)


def turn(state: State, decision: Decided | None, task: Task | None, save: bool = False) -> SendTurn:
    return SendTurn(decision, task, save, _basis_of(state, task), lane(state))


def go_on(state: State, peer: str) -> GoOn:
    history = state.history
    stage, new = history.holders.index(peer), history.next_basis
    return GoOn(
        peer,
        stage,
        decision=None if state.undelivered else history.decision,
        task=state.task,
        save=any(mark.step == history.step for mark in history.pending),
        basis=_basis_of(state, state.task),
        new_basis=None if new is None or stage in state.took_basis else new.version,
        step=history.step,
        lane=lane(state),
    )


def _basis_of(state: State, task: Task | None) -> tuple[int, str]:
    """Version and hash of the basis that a task is done with."""
    history = state.history
    if task is None or task.kind == "sync":
        return history.basis_version, history.basis_sha256
    return history.basis_for(task.step)


def basis(state: State, version: int) -> SendBasis:
    return SendBasis(version, state.history.holders)


def keep(state: State) -> KeepSnapshots:
    return KeepSnapshots(state.history.holders, _others(state))


def pause(state: State) -> TellPause:
    paused = state.history.paused
    return TellPause(None if paused is None else paused.why, state.history.holders, _others(state))


def _others(state: State) -> tuple[str, ...]:
    holders = set(state.history.holders)
    return tuple(peer for peer in state.peers if peer not in holders)
