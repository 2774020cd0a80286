"""A month of a run in virtual time: the real coordinator's machine, and peers that do as they are told, blink and die.

The machine gets every event that a coordinator would, at a coarse grain: a step is one piece of work of all holders
together, which stands while one of them is away, and so are uploads, fetches and builds of one. Of a step only the last
stage's report goes through the machine by itself; the others are put beside it, as they change nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from protomodels_cli import timeouts
from protomodels_cli.bench.homes import Home
from protomodels_cli.bench.month_books import Books
from protomodels_cli.bench.month_clock import Clock, Work
from protomodels_cli.bench.month_size import MEMORY, Size
from protomodels_cli.coordinator import absences, machine, readiness, reasons, recovery
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.checking import right_hashes
from protomodels_cli.coordinator.history import Decided, RolledBack
from protomodels_cli.coordinator.peers import Holding, Peer
from protomodels_cli.coordinator.seats import Absent
from protomodels_cli.coordinator.work import Report, Task, Working
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.parts import Part

RECONNECT = 1.0  # seconds until a peer that was missed has registered again
LINK, SYNC, REUSE = 2.0, 1.0, 1.0  # seconds: to link all stages, to hash U and T_fixed, to say what is in memory
QUIET_TICK, LEAST_TICK = 600.0, 1.0  # seconds: where nobody is away, and right after somebody fell silent
TICK = 0.5  # seconds, of a coordinator: so late it may see that a time is up
COARSE = 5  # ticks, at least, in as long as somebody has been away already


class Month:
    def __init__(self, size: Size, homes: Sequence[Home], seconds: float, patient: bool = True):
        """Not `patient`: as it was before, silence for a lease is a death."""
        self.size, self.seconds, self.patient, self.clock = size, seconds, patient, Clock()
        self.state = machine.start(size.spec, "u0", (1, "t"))
        self.books = Books(size)
        self.homes = {home.name: home for home in homes}
        self.returns: dict[str, float] = {}  # who is away → when it is back
        self.missed: dict[str, Holding | None] = {}  # … → what it has in memory
        self.gone: set[str] = set()  # dead, or dismissed
        self.disks: dict[str, set[Part]] = {}
        self.step: Work | None = None  # under way
        self.step_seconds = (0.0, 0.0)  # of it: by itself, and for the snapshot beside it
        self.task = 0  # its number
        self.preparing: dict[str, Part] = {}  # spare → what it was told to build
        self.built: dict[str, Part] = {}  # … and has
        self.fetches: dict[tuple[str, Part], Work] = {}
        self.uploads: dict[Part, Work] = {}
        self.arrived: dict[tuple[int, int], set[int]] = {}
        self.dismissed = 0
        self._next_tick = 0.0
        cut = tuple(size.layers)
        self._norms = [tuple((unit, 0.25) for unit in steps.units(cut, stage)) for stage in range(len(cut))]
        for home in homes:
            self._at(home.joins, self._join, home)

    def run(self) -> Books:
        self._tick()
        while (coming := self.clock.next(self.seconds)) is not None:
            when, do = coming
            self._pass(when)
            do()
        self._pass(self.seconds)
        self.books.close(self._partial())
        return self.books

    def _at(self, when: float, do: Callable[..., None], *with_these: object) -> None:
        self.clock.at(when, lambda: do(*with_these))

    def _pass(self, until: float) -> None:
        """Book the time until then, and let it pass. Steps are booked once they are decided."""
        state = self.state
        if self.step is None or self.step.since is None:
            kind = state.task.kind if state.placed and state.task is not None else "none"
            waiting = "waiting" if state.peers.keys() - set(state.history.holders) else "no spare"
            on = {"build": "restoring", "link": "restoring", "sync": "snapshots"}.get(kind, waiting)
            self.books.spend(on, until - self.clock.now)
        self.clock.now = until

    # Peers

    def _join(self, home: Home) -> None:
        self.clock.rise(home.name)
        self.disks[home.name] = set()
        for at, lasts in home.blips:
            self._at(at, self._blink, home, at + lasts)
        if home.dies < math.inf:
            self._at(home.dies, self._die, home)
        self._register(home.name, None)

    def _blink(self, home: Home, until: float) -> None:
        """Off the net for a while, or for as long as it lives."""
        name, now = home.name, self.clock.now
        if name in self.gone or not self.clock.is_up(name):
            return
        noticed = until - now >= self.size.lease
        back = math.inf if until >= home.dies else until + RECONNECT * noticed
        self._go_down(name, back)
        if noticed:
            self._at(now + self.size.lease, self._miss, name)
        if back < math.inf:
            self._at(back, self._come_back, name)

    def _die(self, home: Home) -> None:
        if home.name in self.gone:
            return
        self.gone.add(home.name)
        if not self.clock.is_up(home.name):
            self.returns[home.name] = math.inf  # nobody can tell
            return
        self._go_down(home.name, math.inf)
        if home.closed:
            self._miss(home.name, True)
        else:
            self._at(self.clock.now + self.size.lease, self._miss, home.name)

    def _go_down(self, name: str, back: float) -> None:
        self._note_fault(name, back)
        self.clock.fall(name)
        self.returns[name] = back
        state, history, held = self.state, self.state.history, None
        if name in state.seats.holds:
            generation = history.generation if state.stage_of(name) is not None else 0
            held = Holding(
                history.lineage, state.seats.holds[name], history.layers, history.step, generation=generation
            )
        self.missed[name] = held

    def _miss(self, name: str, closed: bool = False) -> None:
        if self.clock.is_up(name) or name not in self.state.peers:
            return
        dead = closed or not self.patient
        self._tell(ev.Left(name, reasons.ConnectionClosed() if dead else reasons.NoHeartbeat(self.size.lease)))
        if self.state.seats.absent:
            self._tick_at(self.clock.now + (timeouts.SESSION_RECONNECT if dead else LEAST_TICK))

    def _come_back(self, name: str) -> None:
        if name in self.gone:
            return
        del self.returns[name]
        held = self.missed.pop(name)
        self.clock.rise(name)
        if name not in self.state.peers:  # it was missed
            self._register(name, held)
        self._look_whether_it_goes_on()

    def _register(self, name: str, held: Holding | None) -> None:
        parts, flops = frozenset(self.disks[name]), self.size.flops
        peer = Peer(name, name, "cuda", MEMORY, flops, "", 0, self.clock.now, held, parts, host_memory=MEMORY)
        self._tell(ev.Joined(peer))

    # The machine

    def _tick(self) -> None:
        if self.clock.now < self._next_tick:
            return  # another is on its way
        self._next_tick = math.inf
        self._tell(ev.Tick())
        words = [self._next_word(absent) for absent in self.state.seats.absent.values()]
        self._tick_at(max(self.clock.now + LEAST_TICK, min([self.clock.now + QUIET_TICK, *words])))

    def _tick_at(self, when: float) -> None:
        if when < self._next_tick:
            self._next_tick = when
            self._at(when, self._tick)

    def _next_word(self, absent: Absent) -> float:
        """When a tick may change what is done about it. A coordinator ticks twice a second, and most change nothing."""
        peer, away = absent.peer, self.clock.now - absent.since
        if absent.until is not None and absent.until > self.clock.now:
            return absent.until
        if absent.until is not None or peer not in self.state.history.holders:
            return self.clock.now
        longest, lease = self.state.conduct.longest.get(peer, 0.0), self.size.lease
        limit = recovery.patience(absences.costs(self.state, peer), away, longest, lease)
        moments = (recovery.FETCH_AFTER, limit / 4, limit, recovery.COMES_BACK * longest, away + away / COARSE)
        return absent.since + TICK + min(moment for moment in moments if moment > away)

    def _tell(self, event: ev.Event) -> None:
        self.state, records, commands = machine.apply(self.state, event, self.clock.now)
        for record in records:
            if isinstance(record, RolledBack):
                self.books.roll_back(record.step)
            elif isinstance(record, Decided):
                self.books.decide(*self.step_seconds)
        task = self.state.task
        if self.step is not None and (task is None or task.number != self.task):
            self.books.break_off(self._partial())
            self.clock.drop(self.step)
            self.step = None
        for command in commands:
            self._do(command)

    def _do(self, command: ev.Command) -> None:
        match command:
            case ev.AssignStage(peer, stage, task, reuse):
                self._assign(peer, stage, task, reuse)
            case ev.PrepareStage(peer, part):
                self._prepare(peer, part)
            case ev.MakeSpare(peer):
                self.preparing.pop(peer, None)
                self.built.pop(peer, None)
            case ev.SendTurn(_, task, save):
                if save:
                    self._save()
                if task is not None:
                    self._start(task, save)
            case ev.KeepSnapshots():
                self._keep()
            case ev.Dismiss(peer):
                self.dismissed += 1
                self.gone.add(peer)
                self.clock.fall(peer)

    def _prepare(self, peer: str, part: Part) -> None:
        """Fetch the part and build its stage; what is told to drop it meanwhile says nothing more of it."""
        self.preparing[peer] = part

        def built() -> None:
            if self.preparing.get(peer) == part:
                self.built[peer] = part
                self._tell(ev.Ready(peer, part))

        def build() -> None:
            if self.preparing.get(peer) == part:
                self.clock.begin(self.size.build[part.stage], frozenset([peer]), built)

        def fetched() -> None:
            self._tell(ev.Prefetched(peer, part))
            build()
            self._prefetch(peer)

        if not part.sha256 or part in self.disks[peer]:
            build()
        else:
            self._fetch(peer, part, fetched)

    def _assign(self, peer: str, stage: int, task: int, reuse: bool) -> None:
        part, has = readiness.wanted(self.state.history, stage), self.built.pop(peer, None)
        self.preparing.pop(peer, None)

        def built() -> None:
            if self._is_at(task):
                self._report(peer, stage, task)

        def build() -> None:
            seconds = REUSE if reuse or has == part else self.size.build[stage]
            self.clock.begin(seconds, frozenset([peer]), built)

        if reuse or has == part or not part.sha256 or part in self.disks[peer]:
            build()
        else:
            self._fetch(peer, part, build)

    def _is_at(self, task: int) -> bool:
        """Tasks are numbered over all generations."""
        return self.state.task is not None and self.state.task.number == task

    def _report(self, peer: str, stage: int, task: int) -> None:
        report = Report(right_hashes(self.state), self._norms[stage], 64.0, 64)
        self._tell(ev.Done(peer, self.state.history.generation, task, report))

    def _start(self, task: Task, save: bool) -> None:
        holders = self.state.history.holders
        if task.kind == "step":
            size = self.size
            uploading = max((work.left for work in self.uploads.values()), default=0.0)
            extra = (size.step_beside - size.step) * min(1.0, uploading / size.step) + size.copy * save
            self.task, self.step_seconds = task.number, (size.step, extra)
            self.step = self.clock.begin(size.step + extra, frozenset(holders), lambda: self._finish(task.number))
            self._look_whether_it_goes_on()
            if (owed := self.state.owed) is not None:
                self.clock.begin(SYNC, frozenset(holders[-1:]), lambda: self._tell_of_subspace(owed))
        else:
            seconds = LINK if task.kind == "link" else SYNC
            self.clock.begin(seconds, frozenset(holders), lambda: self._finish_all(task.number))

    def _finish(self, task: int) -> None:
        """All stages report the step."""
        self.step = None
        hashes, last = right_hashes(self.state), self.state.stages - 1
        heard = {stage: Report(hashes, norms, 64.0, 64) for stage, norms in enumerate(self._norms[:last])}
        assert isinstance(self.state.work, Working)
        self.state = replace(self.state, work=replace(self.state.work, heard=heard))
        self._report(self.state.history.holders[last], last, task)

    def _finish_all(self, task: int) -> None:
        for stage, peer in enumerate(self.state.history.holders):
            if self._is_at(task):
                self._report(peer, stage, task)

    def _tell_of_subspace(self, step: int) -> None:
        history = self.state.history
        self._tell(ev.SubspaceReported(history.holders[-1], history.generation, step, {}, None))

    def _partial(self) -> float:
        """Seconds done of the step under way."""
        if self.step is None:
            return 0.0
        running = self.clock.now - self.step.since if self.step.since is not None else 0.0
        return sum(self.step_seconds) - self.step.left + running

    # Snapshots

    def _save(self) -> None:
        history = self.state.history
        for stage, peer in enumerate(history.holders):
            part = Part(history.lineage, history.step, stage, _hash(history.lineage, history.step, stage))
            if part not in self.uploads and stage not in self.arrived.get((part.lineage, part.step), ()):
                self.disks[peer].add(part)
                arrive = functools.partial(self._arrive, part)
                self.uploads[part] = self.clock.begin(self.size.upload[stage], frozenset([peer]), arrive)

    def _arrive(self, part: Part) -> None:
        del self.uploads[part]
        key = part.lineage, part.step
        here = self.arrived.setdefault(key, set())
        here.add(part.stage)
        self._tell(ev.PartsArrived(*key, frozenset(here)))
        if len(here) == len(self._norms):
            self._tell(ev.SnapshotWhole(*key, tuple(_hash(*key, stage) for stage in range(len(here)))))
            for peer in self.homes:
                self._prefetch(peer)

    def _keep(self) -> None:
        history = self.state.history
        pending = {mark.key for mark in history.pending}
        kept = pending | {mark.key for mark in history.snapshots}
        for part in [part for part in self.uploads if (part.lineage, part.step) not in pending]:
            self.clock.drop(self.uploads.pop(part))
        self.arrived = {key: here for key, here in self.arrived.items() if key in pending}
        for disk in self.disks.values():
            disk.difference_update([part for part in disk if (part.lineage, part.step) not in kept])

    def _fetch(self, peer: str, part: Part, then: Callable[[], None]) -> None:
        """Whatever else this peer was fetching has to make way."""

        def done() -> None:
            del self.fetches[peer, part]
            self.disks[peer].add(part)
            then()

        for other in [key for key in self.fetches if key[0] == peer and key[1] != part]:
            self.clock.drop(self.fetches.pop(other))
        if (under_way := self.fetches.get((peer, part))) is not None:
            under_way.then = done
        else:
            self.fetches[peer, part] = self.clock.begin(self.size.fetch[part.stage], frozenset([peer]), done)

    def _prefetch(self, peer: str) -> None:
        """A warm spare fetches the newest snapshot's parts, each beginning elsewhere."""
        history, parts = self.state.history, self.state.history.newest.as_parts()
        is_idle = peer not in self.preparing and all(other != peer for other, _ in self.fetches)
        is_spare = peer in self.state.peers and peer not in history.holders and self.clock.is_up(peer)
        if not (self.size.spec.snapshots.warm_spares and parts and is_spare and is_idle):
            return
        first = 8 * int(peer[1:].split(".")[0]) % len(parts)
        wanted = next((part for part in parts[first:] + parts[:first] if part not in self.disks[peer]), None)
        if wanted is not None:
            self._fetch(peer, wanted, lambda: self._fetched(peer, wanted))

    def _fetched(self, peer: str, part: Part) -> None:
        self._tell(ev.Prefetched(peer, part))
        self._prefetch(peer)

    # Faults

    def _look_whether_it_goes_on(self) -> None:
        if self.step is not None and self.step.since is not None:
            self.books.go_on()

    def _note_fault(self, name: str, back: float) -> None:
        """What it would cost to wait for it, and to replace it at once: the part fetched unless a spare has it, and all
        computed again that the newest snapshot does not have."""
        now, history = self.clock.now, self.state.history
        if name in history.holders:
            stage, redo = history.holders.index(name), self.books.since(history.newest.step) + self._partial()
        elif self.books.is_open and name in self.preparing:
            stage, redo = self.preparing[name].stage, 0.0  # it was about to take it over
        else:
            return
        spares = [p for p in self.homes if p != name and p not in self.gone and p not in history.holders]
        here = sorted(self._is_free(peer) for peer in spares)
        until_free = here[min(self.books.open_faults, len(here) - 1)] - now if here else math.inf
        parts = history.newest.as_parts()
        has = not parts or any(parts[stage] in self.disks[peer] for peer in spares if self.clock.is_up(peer))
        build = max(self.size.build) if redo else self.size.build[stage]  # after a rollback all stages are built again
        fetch = 0.0 if has else self.size.fetch[stage]
        self.books.fault(stage, back - now, until_free + fetch + build + LINK + redo)

    def _is_free(self, name: str) -> float:
        """When this peer could take a stage."""
        if self.clock.is_up(name):
            return self.clock.now
        return max(self.clock.now, self.returns.get(name, self.homes[name].joins))


def _hash(lineage: int, step: int, stage: int) -> str:
    return f"{lineage}.{step}.{stage}"
