"""The world of the simulation: its time, wires and machines, and what goes wrong there. See simulation.py."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conftest import make_spec
from simulated_coordinator import CoordinatorProcess, Disk
from simulated_peer import Process
from simulated_rules import Rules
from simulated_words import Frame, Machine, PartFile, Violation

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.audit_reasons import AuditFailed
from protomodels_cli.coordinator.history import beginning
from protomodels_cli.coordinator.next_task import waiting_for
from protomodels_cli.coordinator.reasons import ConnectionClosed, NoHeartbeat, PeerReport
from protomodels_cli.cost.units import stage_flops
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.troubles import LinkBroken

LEASE = 5.0
QUIET = 20000.0  # virtual seconds in which an undisturbed network must finish the run


class World:
    def __init__(
        self, seed: int, peers: int = 0, calm: bool = False, log: list[str] | None = None, audited: bool | None = None
    ):
        self.random, self.log, self.now = random.Random(seed), log, 0.0
        self.accuses = seed % 4 == 1  # whether audits find liars here
        self.spec, self.bad_steps = a_spec(self.random)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.stages = len(self.spec.stages) if isinstance(self.spec.stages, list) else int(self.spec.stages)
        self.machines = [Machine(i) for i in range(peers or self.stages + self.random.randrange(3))]
        self.calm, self.sessions, self.processes = calm, 0, 0
        self.uneven = seed % 8 == 3 and not peers
        if self.uneven:
            self._make_uneven(random.Random(f"speeds of {seed}"))
        self.liars: dict[str, str] = {}  # tokens of a third of the machines, and how each of them audits
        if audited if audited is not None else seed % 4 == 2:
            self._audit(random.Random(f"liars of {seed}"))
        self.found: set[str] = set()  # liars' tokens that were dismissed for a lie
        self.reseated = self.kept = 0  # stages that were, and that were not after all
        self.seated: set[int] = set()  # machines whose process has a stage in memory
        self.death = 0.0 if calm else self.random.choice([0.0, 0.0, 0.01, 0.03])
        self.loss = 0.0 if calm else self.random.choice([0.0, 0.01, 0.05])
        self.delay = self.random.choice([0.1, 0.1, 0.1, 1.0])  # of words between a peer and the coordinator, at most
        self.loses_a_frame = False  # the next one
        self.loses_a_word = False  # the next one about the subspace
        self.disk = Disk(beginning("u0"))
        self.coordinator: CoordinatorProcess | None = CoordinatorProcess(self)
        self.rules = Rules(self)
        for home in self.machines:
            self.boot(home)

    def _make_uneven(self, rng: random.Random) -> None:
        """Some machines are much slower than others, and some of these were not when they joined. There is one more,
        and the run is long enough for that to matter."""
        saving = self.spec.snapshots.model_copy(update={"interval": rng.choice([1, 2, 3])})
        self.spec = self.spec.model_copy(update={"steps": 40, "snapshots": saving})
        self.machines.append(Machine(len(self.machines)))
        for home in self.machines if not self.calm else ():
            home.slow = rng.choice([1.0, 8.0, 30.0])
            home.claims = rng.choice([1.0, home.slow])

    def _audit(self, rng: random.Random) -> None:
        """A third of the machines lie in all that they send, and in audits as they like."""
        self.accuses = False
        saving = self.spec.snapshots.model_copy(update={"interval": rng.choice([1, 2, 3])})
        self.spec = self.spec.model_copy(update={"steps": 60, "audit": rng.choice([0.05, 0.5]), "snapshots": saving})
        for home in rng.sample(self.machines, len(self.machines) // 3) if not self.calm else ():
            self.liars[home.token] = rng.choice(["contrary", "contrary", "accuses", "clears", "silent"])

    def compute_seconds(self, home: Machine, layers: tuple[int, ...]) -> list[float]:
        """What each stage takes of a step there: as long as `Process.compute_soon`, on average over the stages."""
        work = stage_flops(self.spec, layers)
        return [0.2 * home.slow * len(work) * stage / sum(work) for stage in work]

    def trace(self, text: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.now:8.2f}  {text}")

    def seats(self) -> list[Machine]:
        return [self.machines[i] for i in sorted(self.seated)]

    # Time

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, do))

    def run_until(self, when: float) -> None:
        while self._queue and self._queue[0][0] <= when and not self.over:
            self.now, _, do = heapq.heappop(self._queue)
            do()
            self.rules.check_processes()
        self.now = max(self.now, when) if not self.over else self.now

    @property
    def over(self) -> bool:
        return self.coordinator is not None and self.coordinator.state.history.over

    # Processes and wires

    def boot(self, home: Machine) -> None:
        if home.process is None:
            self.processes += 1
            home.process = Process(self, home, f"p{home.number}.{self.processes}")

    def to_peer(self, process: Process, session: int, number: int, word: Any) -> None:
        if self.random.random() < self.loss:
            self.trace(f"lost: {type(word).__name__} to {process.id}")

            # The next heartbeat says how many words there were.
            def heartbeat() -> None:
                if process.expected <= number:
                    process.hear(session, number + 1, None)

            process.soon(heartbeat, 1, 2, even_if_cut=False)
            return
        times = 2 if self.random.random() < self.loss else 1
        for _ in range(times):
            process.soon(lambda: process.hear(session, number, word), *self._in_order(process), even_if_cut=False)

    def _in_order(self, process: Process) -> tuple[float, float]:
        """A stream keeps its order: later words never arrive earlier."""
        at = max(getattr(process, "arrives", 0.0) + 1e-6, self.now + self.random.uniform(0.01, self.delay))
        process.arrives = at  # type: ignore[attr-defined]
        return at - self.now, at - self.now

    def to_coordinator(self, process: Process, event: ev.Event) -> None:
        if self.loses_a_word and isinstance(event, ev.SubspaceReported | ev.BasisTaken):
            self.loses_a_word = False
            self.trace(f"{process.id} does not say {type(event).__name__}, and is well otherwise")
            return
        session = process.session
        at = max(getattr(process, "leaves", 0.0) + 1e-6, self.now + self.random.uniform(0.01, self.delay))
        if self.coordinator is not None:  # a session's words follow its registration
            at = max(at, self.coordinator.hears_at.get(process.id, 0.0) + 1e-6)
        process.leaves = at  # type: ignore[attr-defined]

        def arrive() -> None:
            c = self.coordinator
            if process.alive and process.home.cut:  # sent again and again, until there is nobody to send it to
                self.after(0.5, arrive)
            elif (
                c is not None and process.reachable and session and c.sessions.get(process.id, (None, 0))[1] == session
            ):
                c.take(event)

        self.after(at - self.now, arrive)

    def hang_up(self, process: Process) -> None:
        """A session ends; both sides notice, but for every fourth, which the coordinator takes to be there until the
        next one replaces it."""
        c, unnoticed = self.coordinator, process.alive and process.session % 4 == 0
        if (
            c is not None
            and not unnoticed
            and c.sessions.get(process.id, (None, 0))[1] == process.session
            and process.session
        ):
            del c.sessions[process.id]
            event = ev.Left(process.id, ConnectionClosed())
            wait = max(0.02, c.hears_at.get(process.id, 0.0) - self.now + 1e-6)
            self.after(wait, lambda: c.take(event) if process.id not in c.sessions else None)
        if process.alive:
            process.redial()

    def send_frame(self, sender: Process, stage: int, leg: str, frame: Frame) -> None:
        def arrive() -> None:
            for home in self.seats():
                p = home.process
                m = p.memory if p is not None else None
                # The link of another generation is another link.
                if m is not None and m.stage == stage and m.generation == frame.generation:
                    assert p is not None
                    if home.cut or sender.home.cut:
                        self.after(0.5, arrive)
                        return
                    m.frames[leg].append(frame)
                    p.compute_soon()

        if self.random.random() < self.loss / 5:
            self.trace(f"the link between {sender.id} and stage {stage} broke")
            sender.tell(ev.Trouble(sender.id, PeerReport(LinkBroken(stage)), stage, frame.generation))
            return
        if self.loses_a_frame:
            self.loses_a_frame = False
            self.trace(f"a frame from {sender.id} to stage {stage} is lost without a word")
            return
        sender.soon(arrive)

    def fetch(self, process: Process, key: tuple[int, int, int]) -> PartFile | None:
        if self.coordinator is None or not process.reachable or not process.session:
            return None
        part = self.disk.parts.get(key)
        return part if part is not None else PartFile(*key, "nothing", (0, ""), spoilt=True)

    def take_part(self, process: Process, part: PartFile) -> bool:
        if self.coordinator is None or not process.reachable or not process.session:
            return False
        self.coordinator.take_part(part)
        return True

    # Faults

    def dies_at(self, moment: str) -> bool:
        if self.random.random() >= self.death:
            return False
        self.trace(f"the coordinator dies {moment}")
        self.coordinator_dies()
        return True

    def coordinator_dies(self) -> None:
        c = self.coordinator
        if c is None:
            return
        c.alive = False
        self.coordinator = None
        for home in self.machines:
            if home.process is not None and home.process.session:
                home.process.redial()
        self.after(self.random.uniform(0.1, 20.0), self.coordinator_starts)

    def coordinator_starts(self) -> None:
        if self.coordinator is None:
            self.trace("the coordinator starts")
            self.coordinator = CoordinatorProcess(self)

    def kill(self, home: Machine) -> None:
        p = home.process
        if p is not None:
            self.trace(f"{p.id} is killed")
            p.alive = False
            # A frozen process that is killed hangs up, one that is cut off is missed.
            self.after(LEASE if home.cut else 0.0, lambda: self.hang_up(p))
            home.process = None
            home.frozen = False

    def silence(self, home: Machine, what: str, seconds: float) -> None:
        """Frozen or cut off for a while. If it is longer than the lease, the coordinator notices."""
        p = home.process
        if p is None or home.frozen or home.cut:
            return
        self.trace(f"{p.id} is {what} for {seconds:.1f} s")
        setattr(home, what, True)
        session = p.session

        def notice() -> None:
            c = self.coordinator
            if getattr(home, what) and c is not None and session and c.sessions.get(p.id, (None, 0))[1] == session:
                del c.sessions[p.id]
                c.take(ev.Left(p.id, NoHeartbeat(self.spec.limits.lease_seconds)))

        def mend() -> None:
            setattr(home, what, False)
            c = self.coordinator
            if p.alive and (c is None or c.sessions.get(p.id, (None, 0))[1] != p.session):
                p.redial()  # it finds that it was hung up on
            backlog, p.backlog = p.backlog, []
            for do in backlog:
                p.soon(do, 0.0, 0.05)

        self.after(LEASE, notice)
        self.after(seconds, mend)

    def mischief(self) -> None:
        home = self.random.choice(self.machines)
        p, m = home.process, home.process.memory if home.process else None
        match self.random.randrange(15 + self.accuses):
            case 0 | 1:
                self.kill(home)
            case 2 | 3 | 4:
                self.boot(home)
            case 5:
                self.silence(home, "frozen", self.random.choice([1.0, 4.0, 7.0, 20.0]))
            case 6:
                self.silence(home, "cut", self.random.choice([1.0, 4.0, 7.0, 20.0]))
            case 7:
                if p is not None and not home.cut:
                    self.trace(f"the session of {p.id} breaks")
                    self.hang_up(p)
            case 8:
                self.trace("the coordinator is killed")
                self.coordinator_dies()
            case 9:
                if m is not None and not m.flipped:
                    self.trace(f"a bit flips in {p.id if p else ''}")
                    m.flipped = True
            case 10:
                files = home.disk if self.random.random() < 0.5 else self.disk.parts
                if files:
                    key = self.random.choice(sorted(files))
                    self.trace(f"part {key} is spoilt")
                    files[key] = replace(files[key], spoilt=True)
            case 11:
                full = self.disk if home.number % 2 else home
                full.disk_full = not full.disk_full
            case 12:
                if p is not None:
                    self.trace(f"{p.id} wants to leave")
                    p.leaving = True
                    p.tell(ev.Leaving(p.id))
            case 13:
                event = self.random.choice([ev.PauseRun(), ev.ResumeRun(), ev.ResumeRun(), ev.StopRun()])
                if self.coordinator is not None:
                    self.trace(f"the owner says {type(event).__name__}")
                    self.coordinator.take(event)
            case 14:
                if self.random.random() < 0.5:
                    self.loses_a_frame = True
                else:
                    self.loses_a_word = True
            case 15:
                if p is not None and self.coordinator is not None:
                    self.trace(f"{p.id} is accused")
                    lie = AuditFailed(0, 1, "forward", 9, 99, ("a", "b"))
                    self.coordinator.take(ev.Trouble(p.id, lie))

    def disturb_reseating(self) -> None:
        """Half of the time, somebody is gone for a while before it is done."""
        home = self.random.choice(self.machines)
        match self.random.randrange(4):
            case 0:
                self.after(self.random.uniform(0.0, 4.0), lambda: self.kill(home))
            case 1:
                what = self.random.choice(["frozen", "cut"])
                self.after(self.random.uniform(0.0, 4.0), lambda: self.silence(home, what, 20.0))

    # A whole run

    def live(self, troubles: int) -> str:
        """Chaos, then quiet: the weights at the end."""
        for _ in range(troubles):
            self.run_until(self.now + self.random.expovariate(0.7) * (6.0 if self.uneven else 1.0))
            if not self.over:
                self.mischief()
        self.death = self.loss = 0.0
        for disk in (self.disk, *self.machines):
            disk.disk_full = False
        until = self.now + QUIET
        while not self.over and self.now < until:
            self.run_until(self.now + 5.0)
            self.coordinator_starts()
            for home in self.machines:
                if home.process is None:
                    self.boot(home)
                elif home.process.leaving:
                    home.process.leaving = False
            c = self.coordinator
            if c is not None and c.state.history.paused is not None:
                c.take(ev.ResumeRun())
        if not self.over:
            state = self.coordinator.state if self.coordinator else None
            waits = waiting_for(state, self.now) if state else "a coordinator"
            raise Violation(f"after {QUIET:.0f} quiet seconds it still waits for {waits}")
        assert self.coordinator is not None
        ended = self.coordinator.state.history.ended
        assert ended is not None
        return ended.weights_sha256


def a_spec(rng: random.Random) -> tuple[RunSpec, frozenset[int]]:
    stages, steps = rng.randint(1, 4), rng.randint(6, 40)
    update = {"interval": 4, "window": 2, "delay": rng.randrange(3)} if rng.random() < 0.6 else {}
    spec = make_spec(
        stages=stages,
        steps=steps,
        subspace={"sync_interval": rng.randint(1, 5), "update": update},
        eval={"interval": rng.choice([0, 3])},
        snapshots={
            "interval": rng.choice([0, 1, 2, 3, 5]),
            "every": [None, None, "2s", "9s"][steps % 4],
            "keep": rng.randint(1, 3),
            "warm_spares": rng.random() < 0.5,
        },
        limits={"nonfinite_steps": 3, "nonfinite_action": rng.choice(["pause", "rollback"])},
    )
    bad = frozenset(s for s in range(1, steps) if rng.random() < 0.05)
    if rng.random() < 0.3:  # from a checkpoint, in whatever form: the machine does not look
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"init": "start"})})
    return spec, bad
