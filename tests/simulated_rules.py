"""Rules that hold after every event of the simulation, whatever happened. See simulation.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulated_words import StageMemory, Violation
from table_of_states import Broken, check

from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts
from protomodels_cli.coordinator.history import Decided, Forgot, History, Placed, Record, RolledBack, fold
from protomodels_cli.coordinator.next_task import waiting_for
from protomodels_cli.coordinator.notices import PeerDismissed
from protomodels_cli.coordinator.reasons import NonFinite
from protomodels_cli.coordinator.reseat_notices import StageReseated
from protomodels_cli.coordinator.state import State

if TYPE_CHECKING:
    from simulated_peer import Process
    from simulated_world import World


class Rules:
    """Each raises Violation."""

    def __init__(self, world: World):
        self._world = world
        self._applied: set[tuple[int, int, int]] = set()
        self._decided: dict[int, int] = {}
        self._placed: dict[int, tuple[str, ...]] = {}

    def check_applying(self, process: Process, memory: StageMemory, decided: Decided) -> None:
        once = (memory.lineage, memory.stage, decided.step)
        if once in self._applied:
            raise Violation(f"{process.id}: stage {once[1]} applied step {once[2]} twice in lineage {once[0]}")
        self._applied.add(once)
        if decided.step > self._decided.get(memory.lineage, 0):
            raise Violation(f"{process.id} applied step {decided.step}, which was not decided in its lineage")

    def check_record(self, before: History, record: Record) -> None:
        match record:
            case Decided(step):
                lineage = self._lineage()
                if step <= self._decided.get(lineage, -1):
                    raise Violation(f"step {step} was decided twice in lineage {lineage}")
                self._decided[lineage] = step
            case Placed(generation, layers, of_stages):
                holders = tuple(peer for peers in of_stages for peer in peers)
                if generation in self._placed or any(g > generation for g in self._placed):
                    raise Violation(f"generation {generation} was opened twice")
                if len(set(holders)) < len(holders) or len(holders) != len(layers):
                    raise Violation(f"generation {generation} has stages with {holders}")
                self._placed[generation] = holders
            case RolledBack(lineage, from_lineage, step, why):
                history = self._history()
                if lineage != history.lineage + 1:
                    raise Violation(f"lineage {lineage} follows {history.lineage}")
                if not isinstance(why, NonFinite) and (from_lineage, step) != (
                    history.newest.lineage,
                    history.newest.step,
                ):
                    raise Violation(f"went back to {step}, past the snapshot of {history.newest.step}")
                self._decided[lineage] = step
            case Forgot(_, step):
                if step == 0:
                    raise Violation("the beginning was forgotten")

    def check_dismissed(self, notice: PeerDismissed) -> None:
        if isinstance(notice.reason, AuditFailed | FalseVerdicts):
            token = f"t{notice.peer[1:].partition('.')[0]}"
            if token not in self._world.liars:
                raise Violation(f"{notice.peer}, which is honest, was dismissed: {notice.reason}")
            self._world.found.add(token)

    def check_reseated(self, state: State, done: StageReseated, unseated: set[str]) -> None:
        history = state.history
        if history.newest.key != (history.lineage, history.step):
            raise Violation(f"{done.peer} got stage {done.stage} as it was at {history.newest.step}, at {history.step}")
        slow = {home.process.id: home.slow for home in self._world.machines if home.process is not None}
        if done.peer in unseated and slow.get(done.peer, 0.0) > slow.get(done.before, 0.0) > 0.0:
            raise Violation(f"{done.peer} is back in the place of {done.before}, and known to be slower")

    def _history(self) -> History:
        history = self._world.disk.first
        for record in self._world.disk.journal:
            history = fold(history, record)
        return history

    def _lineage(self) -> int:
        return max((r.lineage for r in self._world.disk.journal if isinstance(r, RolledBack)), default=1)

    def check_coordinator(self, state: State) -> None:
        try:
            check(state)
        except Broken as e:
            raise Violation(str(e)) from None
        if not state.history.over and not state.stopped and waiting_for(state, self._world.now) is None:
            raise Violation("it waits, and does not say for what")
        if state.placed and state.task is not None and len(state.heard) == state.stages:
            raise Violation(f"all have reported on {state.task}, and nothing follows")

    def check_processes(self) -> None:
        held: dict[tuple[int, int], str] = {}
        for home in self._world.seats():
            m = home.process.memory if home.process else None
            if m is None:
                continue
            if m.applied > self._decided.get(m.lineage, 0):
                raise Violation(f"stage {m.stage} is at {m.applied}, beyond what lineage {m.lineage} decided")
            key = (m.generation, m.stage)
            if m.generation and key in held:
                raise Violation(f"{held[key]} and {home.process.id} both hold stage {m.stage} of {m.generation}")
            held[key] = home.process.id if home.process else ""
