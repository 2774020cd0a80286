"""A coordinator in virtual time: the real machine, the journal before the words, and sessions. See simulation.py."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simulated_audits import Audits
from simulated_peer import Process
from simulated_words import T_FIXED, Assignment, Keep, NewBasis, PartFile, Turn, digest

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import machine
from protomodels_cli.coordinator.history import History, Record, fold
from protomodels_cli.coordinator.notices import Notice, PeerDismissed
from protomodels_cli.coordinator.reseat_notices import StageNotReseated, StageReseated, StageReseating
from protomodels_cli.coordinator.sentences import sentence
from protomodels_cli.observe.notices import as_row

if TYPE_CHECKING:
    from simulated_world import World


class Disk:
    """What outlives the coordinator's process."""

    def __init__(self, first: History):
        self.first = first
        self.journal: list[Record] = []
        self.parts: dict[tuple[int, int, int], PartFile] = {}
        self.disk_full = False


class CoordinatorProcess:
    """The coordinator: the machine, the journal before the words, and sessions."""

    def __init__(self, world: World):
        self.world, self.disk = world, world.disk
        history = self.disk.first
        for record in self.disk.journal:
            history = fold(history, record)
        if self.disk.journal:
            self.state = machine.resume(world.spec, T_FIXED, history, world.now)
        else:
            self.state = machine.start(world.spec, history.basis_sha256, T_FIXED)
        self.sessions: dict[str, tuple[Process, int]] = {}
        self.numbers: Counter[int] = Counter()  # words said in a session
        self.announced: Counter[str] = Counter()  # a peer's sessions that the machine has not heard of
        self.hears_at: dict[str, float] = {}  # … and when it will have heard of all
        self.unseated: set[str] = set()  # holders that were too slow, since this start
        self.alive = True
        self.audits = Audits(self) if world.spec.audit else None
        self._look_at_parts()
        world.after(0.5, self._tick)

    def _tick(self) -> None:
        if self.alive:
            self.take(ev.Tick(0 if self.disk.disk_full else 1 << 40))
            self.world.after(0.5, self._tick)

    def register(self, process: Process) -> None:
        self.world.sessions += 1
        process.session, process.expected = self.world.sessions, 0
        self.sessions[process.id] = (process, process.session)
        self.announced[process.id] += 1
        wait = max(self.world.random.uniform(0.0, 0.5), self.hears_at.get(process.id, 0.0) - self.world.now + 1e-6)
        self.hears_at[process.id] = self.world.now + wait
        joined = ev.Joined(process.describe())
        self.world.after(wait, lambda: self._hear_of(process, joined))

    def _hear_of(self, process: Process, joined: ev.Joined) -> None:
        """Others' events may have been taken since it described itself."""
        if self.alive:
            self.announced[process.id] -= 1
            self._say(process.id, self._keep())
            self.take(joined)
            if process.leaving:
                process.tell(ev.Leaving(process.id))

    def take(self, event: ev.Event) -> None:
        if not self.alive:
            return
        if isinstance(event, ev.SnapshotLost):
            event = replace(event, whole_here=self._is_whole(event))
        world, before = self.world, self.state
        state, records, commands = machine.apply(before, event, world.now)
        if records and world.dies_at("before the journal"):
            return
        for record in records:
            world.rules.check_record(before.history, record)
            self.disk.journal.append(record)
        self.state = state
        world.rules.check_coordinator(state)
        if records:
            kinds = ", ".join(str(r) for r in records)
            world.trace(f"{type(event).__name__} → {kinds}")
        if (records or commands) and world.dies_at("before the words"):
            return
        for command in commands:
            self._do(command)
        if self.audits is not None and self.alive:
            self.audits.hear(event)

    def _is_whole(self, lost: ev.SnapshotLost) -> bool:
        """Looks for itself, as the shell does."""
        history, stage = self.state.history, self.state.stage_to_build(lost.peer, lost.generation)
        if stage is None:
            return True
        mark = next((m for m in history.snapshots if (m.lineage, m.step) == (lost.lineage, lost.step)), None)
        if (lost.lineage, lost.step) == (0, 0) and mark and mark.parts:
            self._first_part(stage)  # it is cut again
        part = self.disk.parts.get((lost.lineage, lost.step, stage))
        return bool(mark and part and not part.spoilt and part.sha256 == mark.parts[stage])

    def _do(self, command: ev.Command) -> None:
        history = self.state.history
        match command:
            case ev.AssignStage(peer, stage, task, reuse):
                word = Assignment(
                    command.lane.generation,
                    command.lineage,
                    stage,
                    command.layers,
                    task,
                    command.step,
                    reuse,
                    command.decision,
                    history.newest,
                    command.owed,
                )
                self._say(peer, word)
            case ev.GoOn(peer):
                self._say(peer, self._turn(command))
                if command.new_basis is not None:
                    assert history.next_basis is not None
                    self._say(peer, NewBasis(history.generation, command.new_basis, history.next_basis.sha256))
            case ev.SendTurn():
                for peer in command.lane.holders:
                    self._say(peer, self._turn(command))
            case ev.SendBasis(version, holders):
                assert history.next_basis is not None
                for peer in holders:
                    self._say(peer, NewBasis(history.generation, version, history.next_basis.sha256))
            case ev.KeepSnapshots():
                keep = self._keep()
                for key in [p for p in self.disk.parts if p[:2] not in keep.snapshots]:
                    del self.disk.parts[key]
                for peer in list(self.sessions):
                    self._say(peer, keep)
            case ev.CutCheckpoint(layers):
                self.world.after(self.world.random.uniform(0.0, 5.0), lambda: self._cut(layers))
            case ev.Dismiss(peer) | ev.MakeSpare(peer) | ev.Wait(peer) | ev.PrepareStage(peer):
                self._say(peer, command)
            case ev.Tell(notice):
                self._note_reseating(notice)
                if isinstance(notice, PeerDismissed) and self.audits is not None:
                    self.world.rules.check_dismissed(notice)
                self.world.trace(sentence(notice))
                json.dumps(as_row(notice), allow_nan=False)  # as for events.jsonl
            case ev.Quit():
                self.world.coordinator_dies()

    def _note_reseating(self, notice: Notice) -> None:
        if isinstance(notice, StageReseated):
            self.world.reseated += 1
            self.world.rules.check_reseated(self.state, notice, self.unseated)
            self.unseated |= {notice.before}
        if isinstance(notice, StageReseating):
            self.world.disturb_reseating()
        self.world.kept += isinstance(notice, StageNotReseated)

    def _turn(self, command: ev.SendTurn | ev.GoOn) -> Turn:
        task = command.task
        coming = None if task is None else (task.number, task.kind, task.step)
        version, _ = command.basis
        return Turn(command.lane.generation, command.decision, coming, command.save, version if task else 0)

    def _cut(self, layers: tuple[int, ...]) -> None:
        if self.alive:
            made = [self._first_part(stage) for stage in range(len(layers))]
            self.take(ev.CheckpointCut(layers, tuple(part.sha256 for part in made), "source", tied=False))

    def _first_part(self, stage: int) -> PartFile:
        """With the numbers that the seed would have given, so that all runs end alike."""
        part = PartFile(0, 0, stage, digest("seed", stage), (0, self.disk.first.basis_sha256))
        self.disk.parts[part.key] = part
        return part

    def _keep(self) -> Keep:
        history = self.state.history
        complete = {(m.lineage, m.step) for m in history.snapshots}
        begun = {(m.lineage, m.step) for m in history.pending}
        return Keep(frozenset(complete | begun), frozenset(begun), tuple(history.newest.as_parts()))

    def _say(self, peer: str, word: Any) -> None:
        process, session = self.sessions.get(peer, (None, 0))
        if process is None or self.announced[peer]:
            return
        number = self.numbers[session]
        self.numbers[session] += 1
        self.world.to_peer(process, session, number, word)

    def _look_at_parts(self) -> None:
        """Is a snapshot that was begun whole?"""
        history = self.state.history
        for mark in history.pending:
            here = [self.disk.parts.get((mark.lineage, mark.step, i)) for i in range(len(history.layers))]
            stages = frozenset(part.stage for part in here if part is not None)
            self.world.after(0.0, lambda m=mark, s=stages: self.take(ev.PartsArrived(m.lineage, m.step, s)))
            if all(here) and mark.step not in self.state.saving.whole:
                hashes = tuple(p.sha256 for p in here if p is not None)
                self.world.after(0.0, lambda m=mark, h=hashes: self.take(ev.SnapshotWhole(m.lineage, m.step, h)))

    def take_part(self, part: PartFile) -> None:
        begun = {(m.lineage, m.step) for m in self.state.history.pending}
        if (part.lineage, part.step) in begun:
            self.disk.parts[part.key] = part
            self._look_at_parts()
