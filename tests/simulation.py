"""A run in virtual time: the real state machine, and a model of everything around it that can fail.

A seed decides what is delayed, lost, doubled, killed, frozen, cut and spoilt, and when. After every event the rules
below are checked; at the end, with enough peers and a quiet network, the run must finish with the numbers of a run to
which nothing happened. A stage's numbers are modelled by hashes of all that went into them.

    python tests/simulation.py 10000            that many seeds
    python tests/simulation.py --seed 7 --trace what happens with one of them
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from conftest import make_spec
from simulated_coordinator import CoordinatorProcess, Disk
from simulated_peer import (
    Frame,
    Machine,
    PartFile,
    Process,
    StageMemory,
    Violation,
)

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.history import (
    Decided,
    Forgot,
    History,
    Placed,
    Record,
    RolledBack,
    beginning,
    fold,
)
from protomodels_cli.coordinator.plan import waiting_for
from protomodels_cli.coordinator.state import State
from protomodels_cli.spec import RunSpec

LEASE = 5.0
QUIET = 20000.0  # virtual seconds in which an undisturbed network must finish the run


class World:
    def __init__(self, seed: int, peers: int = 0, calm: bool = False, log: list[str] | None = None):
        self.random, self.log, self.now = random.Random(seed), log, 0.0
        self.spec, self.bad_steps = a_spec(self.random)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.stages = len(self.spec.stages) if isinstance(self.spec.stages, list) else int(self.spec.stages)
        self.machines = [Machine(i) for i in range(peers or self.stages + self.random.randrange(3))]
        self.seated: set[int] = set()  # machines whose process has a stage in memory
        self.calm, self.sessions, self.processes = calm, 0, 0
        self.death = 0.0 if calm else self.random.choice([0.0, 0.0, 0.01, 0.03])
        self.loss = 0.0 if calm else self.random.choice([0.0, 0.01, 0.05])
        self.delay = self.random.choice([0.1, 0.1, 0.1, 1.0])  # of words between a peer and the coordinator, at most
        self.loses_a_frame = False  # the next one
        self.disk = Disk(beginning("u0"))
        self.coordinator: CoordinatorProcess | None = CoordinatorProcess(self)
        self._applied: set[tuple[int, int, int]] = set()
        self._decided: dict[int, int] = {}
        self._placed: dict[int, tuple[str, ...]] = {}
        for home in self.machines:
            self.boot(home)

    def trace(self, text: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.now:8.2f}  {text}")

    def _seats(self) -> list[Machine]:
        return [self.machines[i] for i in sorted(self.seated)]

    # Time

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, do))

    def run_until(self, when: float) -> None:
        while self._queue and self._queue[0][0] <= when and not self.over:
            self.now, _, do = heapq.heappop(self._queue)
            do()
            self.check_processes()
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

            # The next beat says how many words there were.
            def beat() -> None:
                if process.expected <= number:
                    process.hear(session, number + 1, None)

            process.soon(beat, 1, 2, even_if_cut=False)
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
        session = process.session
        at = max(getattr(process, "leaves", 0.0) + 1e-6, self.now + self.random.uniform(0.01, self.delay))
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

    def hang_up(self, process: Process, may_return: bool = True) -> None:
        """A session ends; both sides notice."""
        c = self.coordinator
        if c is not None and c.sessions.get(process.id, (None, 0))[1] == process.session and process.session:
            del c.sessions[process.id]
            event = ev.Left(process.id, "its connection ended", may_return)
            wait = max(0.02, c.hears_at.get(process.id, 0.0) - self.now + 1e-6)
            self.after(wait, lambda: c.take(event) if process.id not in c.sessions else None)
        if process.alive:
            process.redial()

    def send_frame(self, sender: Process, stage: int, leg: str, frame: Frame) -> None:
        def arrive() -> None:
            for home in self._seats():
                p = home.process
                m = p.memory if p is not None else None
                # The link of another generation is another link.
                if m is not None and m.stage == stage and m.generation == frame.generation:
                    assert p is not None
                    if home.cut or sender.home.cut:
                        self.after(0.5, arrive)
                        return
                    m.frames[leg].append(frame)
                    p.soon(p.compute)

        if self.random.random() < self.loss / 5:
            self.trace(f"the link between {sender.id} and stage {stage} broke")
            sender.tell(ev.Trouble(sender.id, "the stream broke", stage, frame.generation))
            return
        if self.loses_a_frame:
            self.loses_a_frame = False
            self.trace(f"a frame from {sender.id} to stage {stage} is lost without a word")
            return
        sender.soon(arrive)

    def fetch(self, process: Process, place: tuple[int, int, int]) -> PartFile | None:
        if self.coordinator is None or not process.reachable or not process.session:
            return None
        part = self.disk.parts.get(place)
        return part if part is not None else PartFile(*place, "nothing", (0, ""), spoilt=True)

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
                c.take(ev.Left(p.id, "not heard of"))

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
        match self.random.randrange(15):
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
                    place = self.random.choice(sorted(files))
                    self.trace(f"part {place} is spoilt")
                    files[place] = replace(files[place], spoilt=True)
            case 11:
                home.disk_full = not home.disk_full
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
                self.loses_a_frame = True

    # Rules

    def applied(self, process: Process, memory: StageMemory, decided: Decided) -> None:
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
            case Placed(generation, layers, holders):
                if generation in self._placed or any(g > generation for g in self._placed):
                    raise Violation(f"generation {generation} was opened twice")
                if len(set(holders)) < len(holders) or len(holders) != len(layers):
                    raise Violation(f"generation {generation} has stages with {holders}")
                self._placed[generation] = holders
            case RolledBack(lineage, from_lineage, step, why):
                history = self._history()
                if lineage != history.lineage + 1:
                    raise Violation(f"lineage {lineage} follows {history.lineage}")
                if "non-finite" not in why and (from_lineage, step) != (history.newest.lineage, history.newest.step):
                    raise Violation(f"went back to {step}, past the snapshot of {history.newest.step}")
                self._decided[lineage] = step
            case Forgot(_, step):
                if step == 0:
                    raise Violation("the beginning was forgotten")

    def _history(self) -> History:
        history = self.disk.first
        for record in self.disk.journal:
            history = fold(history, record)
        return history

    def _lineage(self) -> int:
        return max((r.lineage for r in self.disk.journal if isinstance(r, RolledBack)), default=1)

    def check_coordinator(self, state: State) -> None:
        if not state.history.over and not state.stopped and not waiting_for(state, self.now):
            raise Violation("it waits, and does not say for what")
        if state.placed and state.task is not None and len(state.heard) == state.stages:
            raise Violation(f"all have reported on {state.task}, and nothing follows")

    def check_processes(self) -> None:
        held: dict[tuple[int, int], str] = {}
        for home in self._seats():
            m = home.process.memory if home.process else None
            if m is None:
                continue
            if m.applied > self._decided.get(m.lineage, 0):
                raise Violation(f"stage {m.stage} is at {m.applied}, beyond what lineage {m.lineage} decided")
            key = (m.generation, m.stage)
            if m.generation and key in held:
                raise Violation(f"{held[key]} and {home.process.id} both hold stage {m.stage} of {m.generation}")
            held[key] = home.process.id if home.process else ""

    # A whole run

    def live(self, troubles: int) -> str:
        """Chaos, then quiet: the weights at the end."""
        for _ in range(troubles):
            self.run_until(self.now + self.random.expovariate(0.7))
            if not self.over:
                self.mischief()
        self.death = self.loss = 0.0
        for home in self.machines:
            home.disk_full = False
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
            "keep": rng.randint(1, 3),
            "warm_spares": rng.random() < 0.5,
        },
        limits={"nonfinite_steps": 3, "nonfinite_action": rng.choice(["pause", "return"])},
    )
    bad = frozenset(s for s in range(1, steps) if rng.random() < 0.05)
    return spec, bad


def simulate(seed: int, log: list[str] | None = None, peers: int = 0) -> None:
    """Raises Violation."""
    calm = World(seed, peers, calm=True)
    expected = calm.live(0)
    world = World(seed, peers, log=log)
    found = world.live(world.random.randrange(5, 60))
    if found != expected:
        raise Violation("the weights are not those of a run to which nothing happened")


def try_seed(seed: int) -> tuple[int, str]:
    try:
        simulate(seed)
    except Exception as e:
        return seed, f"{type(e).__name__}: {e}"
    return seed, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--peers", type=int, default=0)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    if options.seed is not None:
        log: list[str] = []
        try:
            simulate(options.seed, log, options.peers)
        finally:
            if options.trace:
                print("\n".join(log))
        print(f"seed {options.seed}: no violation")
        return
    failed = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for seed, why in pool.map(try_seed, seeds, chunksize=20):
            if why:
                failed.append(seed)
                print(f"seed {seed}: {why}   (again: scripts/simulate.sh --seed {seed} --trace)", flush=True)
    print(f"{options.seeds} seeds, {len(failed)} violations")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
