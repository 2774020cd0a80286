"""Audits in virtual time: the real judge, and auditors of which some lie. See simulation.py."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.judging import Hearing, Judge
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.voices import voice_of
from protomodels_cli.protocol.audit import Compared, drawn

if TYPE_CHECKING:
    from simulated_coordinator import CoordinatorProcess

LIE, NONE = Compared("forward", 1000, 400), Compared("forward", 1000, 0)


class Audits:
    """What coordinator/auditing.py does, without messages: an auditor knows whether the suspect's machine lies."""

    def __init__(self, coordinator: CoordinatorProcess):
        self._coordinator, self._world = coordinator, coordinator.world
        self._judge, self._draw = Judge(), random.Random(f"audits of {self._world.sessions}")
        self._key: tuple[int, int, int] = (0, 0, 0)  # lineage, generation and step that were recorded last
        self._reported: dict[int, Peer] = {}  # stage → its holder then
        self._before, self._busy = 0, False

    @property
    def _state(self) -> State:
        return self._coordinator.state

    def hear(self, event: ev.Event) -> None:
        state, history = self._state, self._state.history
        if isinstance(event, ev.Done) and event.report.recorded is not None:
            stage, key = state.stage_of(event.peer), (history.lineage, event.generation, event.report.recorded.step)
            if stage is not None and event.generation == history.generation and event.peer in state.peers:
                if key != self._key:
                    self._key, self._reported = key, {}
                self._reported[stage] = state.peers[event.peer]
        newest = history.newest
        if self._busy or not newest.parts or (newest.lineage, newest.step + 1) != (self._key[0], self._key[2]):
            return
        if len(self._reported) == len(history.layers) > 1:
            steps, self._before = max(1, newest.step - self._before), newest.step
            hearings = [Hearing(i, self._key[2], history.layers, history.holders, p) for i, p in self._reported.items()]
            chosen = drawn(self._world.spec.audit, steps, len(hearings), self._draw)
            self._key, self._reported = (0, 0, 0), {}
            self._hold([one for one in hearings if one.stage in chosen or self._judge.wants(state, one, self._draw)])

    def _hold(self, hearings: list[Hearing]) -> None:
        self._busy = bool(hearings)
        if not hearings:
            return
        hearing = hearings[0]
        auditor = next(self._judge.auditors(self._state, hearing, self._draw), None)
        if auditor is None or self._judge.is_over(self._state, hearing):
            self._conclude(hearing)
            self._hold(hearings[1:])
            return
        hearing.asked.append(auditor)
        self._world.after(self._draw.uniform(0.5, 5.0), lambda: self._answer(hearings, auditor))

    def _answer(self, hearings: list[Hearing], auditor: Peer) -> None:
        if not self._coordinator.alive:
            return
        hearing, world = hearings[0], self._world
        lied, kind = hearing.suspect.token in world.liars, world.liars.get(auditor.token, "")
        if auditor.id not in self._state.peers or kind == "silent":
            self._judge.no_result(auditor)
        else:
            says = {"": lied, "contrary": not lied, "accuses": True, "clears": False}[kind]
            self._judge.take(hearing, auditor, [LIE if says else NONE])
            if hearing.accusers:
                self._coordinator.take(ev.Accused(hearing.stage, frozenset(map(voice_of, hearing.accusers))))
        self._hold(hearings)

    def _conclude(self, hearing: Hearing) -> None:
        if hearing.accusers or hearing.clearers:
            _, dismissed = self._judge.conclude(self._state, hearing)
            for trouble in dismissed:
                self._world.trace(f"{trouble.peer} is found to lie")
                self._coordinator.take(trouble)
