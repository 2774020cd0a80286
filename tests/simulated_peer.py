"""A peer in virtual time: as the worker behaves, with hashes for numbers. See simulation.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulated_words import T_FIXED, Assignment, Frame, Keep, NewBasis, PartFile, StageMemory, Turn, Violation, digest

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.history import Decided
from protomodels_cli.coordinator.peers import Holding, Peer
from protomodels_cli.coordinator.snapshots.failures import NotWritten
from protomodels_cli.coordinator.work import Hashes, Report
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.audit import Recorded
from protomodels_cli.protocol.parts import Part
from protomodels_cli.wire.usage import Usage

if TYPE_CHECKING:
    from simulated_words import Machine
    from simulated_world import World


class Process:
    """A peer: as the worker behaves, without the arithmetic."""

    def __init__(self, world: World, home: Machine, name: str):
        self.world, self.home, self.id = world, home, name
        self._memory: StageMemory | None = None
        self.assigned: Assignment | None = None  # the last that it was given
        self.alive, self.session, self.dialling = True, 0, False
        self.expected = 0  # the number of the next word from the coordinator
        self.backlog: list[Callable[[], None]] = []  # what came while it was frozen
        self.leaving = False
        self.uploads: dict[tuple[int, int, int], PartFile] = {}
        self.failed: dict[tuple[int, int], int] = {}  # snapshots for which it could not write the part of its stage
        self.is_spare = False
        self.preparing: Part | None = None  # whose stage it was told to build
        self.built: tuple[Part, str, tuple[int, str]] | None = None  # … and has: its numbers and basis
        self.newest: tuple[Part, ...] = ()  # all parts of the newest complete snapshot
        self.redial()

    @property
    def memory(self) -> StageMemory | None:
        return self._memory

    @memory.setter
    def memory(self, memory: StageMemory | None) -> None:
        self._memory = memory
        (self.world.seated.discard if memory is None else self.world.seated.add)(self.home.number)

    @property
    def reachable(self) -> bool:
        return self.alive and not self.home.cut

    def soon(self, do: Callable[[], None], least: float = 0.01, most: float = 0.2, even_if_cut: bool = True) -> None:
        """Do it after a while, unless the process is gone by then. What comes over the net waits while that is cut."""

        def later() -> None:
            if not self.alive:
                return
            if self.home.frozen or (self.home.cut and not even_if_cut):
                self.backlog.append(do)
            else:
                do()

        self.world.after(self.world.random.uniform(least, most), later)

    # The coordinator

    def redial(self) -> None:
        self.session = 0
        if not self.dialling:
            self.dialling = True
            self.soon(self._dial, 0.1, 2.0)

    def _dial(self) -> None:
        self.dialling = False
        if self.session:
            return
        if not self.reachable or self.world.coordinator is None:
            self.redial()
            return
        self.world.coordinator.register(self)
        if self.memory is not None and self.memory.done is not None:
            self.tell(self.memory.done)  # it may not have been heard

    def describe(self) -> Peer:
        m, holding = self.memory, None
        if m is not None:
            prepared = m.prepared[0] if m.prepared else 0
            holding = Holding(m.lineage, m.stage, m.layers, m.applied, prepared, m.generation)
        parts = frozenset(Part(*p.key, p.sha256) for p in self.home.disk.values())
        speed = 1e9 / self.home.claims
        now, token = self.world.now, self.home.token
        return Peer(self.id, self.id, "cpu", 1 << 34, speed, "", 0, now, holding, parts, token=token)

    def hear(self, session: int, number: int, word: Any) -> None:
        """A word of the coordinator's arrives."""
        if session != self.session or not self.reachable:
            return
        if number < self.expected:
            return  # twice
        if number > self.expected:  # one is missing: what came after it is not obeyed
            self.world.trace(f"{self.id} missed a word")
            self.world.hang_up(self)
            return
        self.expected += 1
        getattr(self, "_" + type(word).__name__.lower())(word)

    def tell(self, event: ev.Event) -> None:
        self.world.to_coordinator(self, event)

    def _makespare(self, word: ev.MakeSpare) -> None:
        self.memory = self.assigned = self.preparing = self.built = None
        self.is_spare = True
        self._fetch_ahead()

    def _wait(self, word: ev.Wait) -> None:
        self.assigned = None
        if self.memory is not None:
            self._drop_work(0)

    def _dismiss(self, word: ev.Dismiss) -> None:
        self.alive = False
        self.home.process = None

    def _keep(self, word: Keep) -> None:
        for key in [p for p in self.home.disk if p[:2] not in word.snapshots]:
            del self.home.disk[key]
            self.uploads.pop(key, None)
        for key in [p for p in self.home.disk if p[:2] in word.begun]:
            self.uploads.setdefault(key, self.home.disk[key])
        self._upload()
        self.failed = {name: stage for name, stage in self.failed.items() if name in word.begun}
        for (lineage, step), stage in sorted(self.failed.items()):
            self.tell(ev.PartFailed(self.id, lineage, step, stage, NotWritten("full")))
        self.newest = word.newest
        self._fetch_ahead()

    def _preparestage(self, word: ev.PrepareStage) -> None:
        self.memory, self.assigned, self.is_spare = None, None, False
        self.preparing, self.built = word.part, None
        self.soon(lambda: self._prepare(word.part), 0.1, 3.0)

    def _prepare(self, wanted: Part) -> None:
        if self.preparing != wanted:
            return  # dropped, or assigned since
        before = self.home.disk.get((*wanted.snapshot, wanted.stage))
        found = self._read(wanted, 0)
        if found is None:
            return
        if wanted.sha256 and self.home.disk[*wanted.snapshot, wanted.stage] is not before:
            self.tell(ev.Prefetched(self.id, wanted))

        def build() -> None:
            if self.preparing == wanted:
                self.built = wanted, *found
                self.tell(ev.Ready(self.id, wanted))

        self.soon(build, 0.05, 0.5)

    def _read(self, wanted: Part, generation: int) -> tuple[str, tuple[int, str]] | None:
        """Numbers and basis to build a stage from; none where they cannot be had, which it says."""
        if not wanted.sha256:
            return digest("seed", wanted.stage), (0, self.world.disk.first.basis_sha256)
        key = (*wanted.snapshot, wanted.stage)
        part = self.home.disk.get(key)
        if self.world.random.random() < self.world.loss:  # its own disk, or memory
            self.tell(ev.SnapshotLost(self.id, generation, *wanted.snapshot, "not to be read"))
            return None
        if part is None or part.spoilt or part.sha256 != wanted.sha256:
            if self.home.disk.pop(key, None) is not None:
                self.tell(ev.Lacking(self.id, wanted))
            part = self.world.fetch(self, key)
            if part is None:
                self.redial_if_lost()
                return None
            if part.spoilt or part.sha256 != wanted.sha256:
                self.tell(ev.SnapshotLost(self.id, generation, *wanted.snapshot, "damaged"))
                return None
            self.home.disk[key] = part
        return part.numbers, part.basis

    def _fetch_ahead(self) -> None:
        if self.world.spec.snapshots.warm_spares and self.is_spare:
            for part in self.newest:
                self.soon(lambda part=part: self._fetch(part), 0.1, 3.0)

    def _fetch(self, wanted: Part) -> None:
        key = (*wanted.snapshot, wanted.stage)
        if self.is_spare and wanted in self.newest and key not in self.home.disk:
            part = self.world.fetch(self, key)
            if part is not None and not part.spoilt and part.sha256 == wanted.sha256:
                self.home.disk[key] = part
                self.tell(ev.Prefetched(self.id, wanted))

    def _drop_work(self, generation: int) -> None:
        m = self.memory
        assert m is not None
        m.generation, m.run, m.forward, m.task, m.done = generation, None, None, 0, None
        m.frames = {"forward": deque(), "backward": deque()}

    def _assignment(self, word: Assignment) -> None:
        self.assigned, self.is_spare, self.preparing = word, False, None
        if word.reuse:
            m = self.memory
            assert m is not None, "told to reuse what it does not have"
            self._drop_work(word.generation)
            decided = word.decision
            if decided is not None and m.applied == decided.step - 1 and m.prepared is not None:
                self._decide(decided)  # what it says of the subspace then is asked for with the assignment
            m.prepared = None
            if (m.lineage, m.applied) != (word.lineage, word.step):
                raise Violation(f"{self.id} keeps {m.lineage}/{m.applied} where {word.lineage}/{word.step} belongs")
            self._built(word)
        else:
            self.memory = None
            self.soon(lambda: self._restore(word), 0.05, 0.5)

    def _restore(self, word: Assignment) -> None:
        if self.assigned is not word:
            return  # another assignment was given since
        mark, (built, self.built) = word.mark, (self.built, None)
        wanted = Part(mark.lineage, mark.step, word.stage, mark.parts[word.stage] if mark.parts else "")
        found = built[1:] if built is not None and built[0] == wanted else self._read(wanted, word.generation)
        if found is None:
            return
        numbers, basis = found
        self.memory = StageMemory(word.lineage, word.stage, word.layers, mark.step, numbers, basis, word.generation)
        self._built(word)

    def redial_if_lost(self) -> None:
        if self.session:
            self.world.hang_up(self)

    def _built(self, word: Assignment) -> None:
        m = self.memory
        assert m is not None
        if word.owed and m.report is not None and m.report[0] == word.owed:
            self._report()
        self._report_done(m, word.task, Report(hashes=self._hashes()))

    def _hashes(self) -> Hashes:
        m = self.memory
        assert m is not None
        version, sha256 = m.basis
        return Hashes(version, sha256 + "!" if m.flipped else sha256, *T_FIXED)

    def _sendbasis(self, word: NewBasis) -> None:
        m = self.memory
        if m is not None and m.generation == word.generation:
            m.held = (word.version, word.sha256)
            self.tell(ev.BasisTaken(self.id, m.generation, word.version, word.sha256))

    _newbasis = _sendbasis

    def _turn(self, word: Turn) -> None:
        m = self.memory
        if m is None or m.generation != word.generation:
            return
        if word.decision is not None and word.decision.step > m.applied and self._decide(word.decision):
            self._report()
        if word.save:
            self._save()
        if word.task is None or word.task[0] <= m.task:
            return  # none, or one that is under way
        number, kind, step = word.task
        m.task = number
        match kind:
            case "link" | "evaluation" | "finish":
                report = Report(loss_sum=1.0, tokens=1, parameters=((f"stage-{m.stage}", m.numbers),))
                self.soon(lambda: self._done(m, word.generation, number, report))
            case "sync":
                report = Report(hashes=self._hashes())
                self.soon(lambda: self._done(m, word.generation, number, report))
            case "step":
                if m.applied != step - 1:
                    raise Violation(f"{self.id} at step {m.applied} was granted step {step}")
                if word.basis_version != m.basis[0]:
                    assert m.held is not None
                    assert m.held[0] == word.basis_version
                    m.basis, m.held = m.held, None
                    m.numbers = digest(m.numbers, "moved to", m.basis)
                m.prepared, m.run, m.forward = None, (number, step), None
                if m.stage == 0:
                    m.frames["forward"].append(Frame(m.generation, m.lineage, step, digest("ids", step)))
                self.compute_soon()

    def _done(self, memory: StageMemory, generation: int, task: int, report: Report) -> None:
        if self.memory is memory and memory.generation == generation:
            self._report_done(memory, task, report)

    def _report_done(self, memory: StageMemory, task: int, report: Report) -> None:
        memory.done = ev.Done(self.id, memory.generation, task, report)
        self.tell(memory.done)

    # The stage

    def compute_soon(self) -> None:
        self.soon(self.compute, 0.01 * self.home.slow, 0.2 * self.home.slow)

    def compute(self) -> None:
        """Take what can be taken: a gradient, else an activation."""
        m = self.memory
        if m is None or m.run is None:
            return
        task, step = m.run
        last, numbers = m.stage == len(m.layers) - 1, digest(m.numbers, "flipped") if m.flipped else m.numbers
        if m.forward is None and m.frames["forward"]:
            frame = self._consume("forward", step)
            m.forward = digest(numbers, frame.content)
            if last:
                m.frames["backward"].append(Frame(m.generation, m.lineage, step, digest("loss", m.forward)))
            else:
                self.world.send_frame(self, m.stage + 1, "forward", Frame(m.generation, m.lineage, step, m.forward))
            self.compute_soon()
        elif m.forward is not None and m.frames["backward"]:
            frame = self._consume("backward", step)
            gradient = digest(numbers, m.forward, frame.content)
            if m.stage > 0:
                self.world.send_frame(self, m.stage - 1, "backward", Frame(m.generation, m.lineage, step, gradient))
            m.run, m.prepared = None, (m.generation, gradient)
            bad = step in self.world.bad_steps and m.stage == 0
            norms = tuple((unit, float("inf") if bad else 0.25) for unit in steps.units(m.layers, m.stage))
            usage = Usage(compute_s=self.world.compute_seconds(self.home, m.layers)[m.stage])
            recorded = Recorded(step) if self.world.spec.audit else None
            report = Report(norms=norms, loss_sum=64.0, tokens=64, usage=usage, recorded=recorded)
            self._report_done(m, task, report)

    def _consume(self, leg: str, step: int) -> Frame:
        m = self.memory
        assert m is not None
        frame = m.frames[leg].popleft()
        if frame.lineage != m.lineage:
            raise Violation(f"{self.id} of lineage {m.lineage} took a frame of lineage {frame.lineage}")
        if frame.step != step or m.applied != step - 1:
            raise Violation(f"{self.id} at step {m.applied} took a frame of step {frame.step}")
        return frame

    def _decide(self, decided: Decided) -> bool:
        """Whether it has something new to say of the subspace then."""
        m = self.memory
        assert m is not None
        if decided.step != m.applied + 1 or m.prepared is None:
            raise Violation(f"{self.id} at step {m.applied} was told the outcome of step {decided.step}")
        self.world.rules.check_applying(self, m, decided)
        if decided.apply:
            m.numbers = digest(m.numbers, m.prepared[1], decided.step)
        m.applied, m.prepared = decided.step, None
        if m.stage == len(m.layers) - 1 and steps.reports(self.world.spec.subspace, decided.step):
            m.report = (decided.step, digest(m.numbers, "basis"))
            return True
        return False

    def _report(self) -> None:
        m = self.memory
        assert m is not None
        assert m.report is not None
        step, sha256 = m.report
        moved = self.world.spec.subspace.update.interval > 0
        generation = m.generation
        event = ev.SubspaceReported(self.id, generation, step, {"x": 1.0}, sha256 if moved else None)
        self.soon(lambda: self.tell(event), 0.05, 3.0)

    # Snapshots

    def _save(self) -> None:
        m = self.memory
        assert m is not None
        part = PartFile(m.lineage, m.applied, m.stage, m.numbers, m.basis)
        if part.key in self.home.disk:
            self.uploads.setdefault(part.key, self.home.disk[part.key])
            self._upload()
            return

        self.failed.pop(part.key[:2], None)

        def write() -> None:
            if self.home.disk_full:
                self.failed[part.key[:2]] = part.stage
                self.tell(ev.PartFailed(self.id, *part.key, NotWritten("full")))
                return
            self.home.disk[part.key] = self.uploads[part.key] = part
            self._upload()

        self.soon(write, 0.1, 1.0)

    def _upload(self) -> None:
        def upload() -> None:
            for key in list(self.uploads):
                if self.world.take_part(self, self.uploads[key]):
                    self.uploads.pop(key)
            self._upload()  # what is left, again

        if self.uploads:
            self.soon(upload, 0.1, 3.0)
