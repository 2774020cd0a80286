"""What faults cost at the demo's size: how soon they are noticed, how soon the next step is granted, and what being
prepared for them costs: snapshots beside the steps, and the journal that a coordinator reads when it starts again. And
a month at the sizes that we promise, in virtual time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from protomodels_cli.bench import month_report, month_runs
from protomodels_cli.bench.loopback import pipeline, small
from protomodels_cli.coordinator.file_names import JOURNAL
from protomodels_cli.coordinator.history import Decided, History
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.journal import Journal, read
from protomodels_cli.coordinator.run_dir import run_of
from protomodels_cli.errors import UserError
from protomodels_cli.launch.cable import Cable, cable
from protomodels_cli.launch.local import LocalRun, local_run, peers_of
from protomodels_cli.observe.process import peak_memory_of
from protomodels_cli.quantities import duration, size

KINDS = ("kill -9", "SIGSTOP", "cut line")
LONG, BUSY = 1_000_000, 20  # steps
INTERVAL, BESIDE = 20, 5  # steps from one snapshot to the next; those of them that its writing and sending may delay
PATIENCE = 120.0  # seconds
RESTART_BOUND, MEMORY_BOUND = 1.0, 150_000_000  # seconds and bytes: a machine that only coordinates is a cheap server
Say = Callable[[str], None]


def measure(turns: int, only: str | None, say: Say, **month: Any) -> dict[str, Any]:
    """`month`: what month_runs.measure takes."""
    result: dict[str, Any] = {}
    for name, part in PARTS.items():
        if only in (None, name):
            result[name] = part(turns)
            say(in_words(name, result[name]))
    if only in (None, "month"):
        result["month"] = month_runs.measure(**month)
        say(month_report.in_words(result["month"]))
    return result


def takeover(turns: int) -> dict[str, Any]:
    """Seconds from a fault to the coordinator's notice and to the next granted step, with a spare waiting."""
    rows = []
    with _scene() as scene:
        for turn in range(turns):
            for kind in KINDS:
                rows.append(scene.fault(kind, stage=1 + turn % (scene.stages - 1)))
    return {"lease_s": scene.lease, "rows": rows}


@contextlib.contextmanager
def _scene() -> Iterator[_Scene]:
    spec = small(steps=LONG, snapshots={"interval": INTERVAL})
    peers = range(1, peers_of(spec) + 2)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as laid:
        cables = {i: laid.enter_context(cable()) for i in peers}
        with local_run(
            spec,
            Path(folder) / "run",
            join_options=["--no-listen"],  # so that all that a peer sends goes over its cable
            through=lambda i, link: cables[i].through(link),
            spares=1,
        ) as running:
            lines = {f"peer-{i}": line for i, line in cables.items()}
            yield _Scene(running, lines, peers_of(spec), spec.limits.lease_seconds)


class _Scene:
    def __init__(self, running: LocalRun, cables: dict[str, Cable], stages: int, lease: float):
        self._running, self._cables, self.stages, self.lease = running, cables, stages, lease
        self._wait(lambda: self._found("stages_linked"), "the run did not start")

    def fault(self, kind: str, stage: int) -> dict[str, Any]:
        """Inject a fault into the holder of the stage, and undo it when the run has recovered."""
        self._calm()
        name, step = self._holder(stage), self._step()
        at = time.time()
        self._do(kind, name)
        noticed = self._wait(
            lambda: self._found("peer_lost", since=at, name=name), f"the coordinator did not notice the loss of {name}"
        )
        # With this notice goes the next step, or the sync or evaluation that is due before it.
        granted = self._wait(lambda: self._found("stages_linked", since=at), "the run did not continue")
        self._undo(kind, name)
        return {
            "fault": kind,
            "stage": stage,
            "step": step,
            "noticed_s": noticed["at"] - at,
            "next_step_s": granted["at"] - at,
        }

    def _do(self, kind: str, name: str) -> None:
        if kind == "cut line":
            self._cables[name].cut()
        else:
            self._running.peers[name].send_signal(signal.SIGKILL if kind == "kill -9" else signal.SIGSTOP)

    def _undo(self, kind: str, name: str) -> None:
        if kind == "cut line":
            self._cables[name].mend()
        elif kind == "SIGSTOP":
            self._running.peers[name].send_signal(signal.SIGCONT)
        else:
            self._running.peers[name].wait()
            self._running.start_again(name)

    def _calm(self) -> None:
        """Wait until there is a spare again, and a new snapshot."""
        began = self._step()

        def calm() -> bool:
            history = _history(self._running.folder)
            here: set[str] = set()
            for event in self._events():
                if event["kind"] in ("peer_joined", "peer_returned"):
                    here.add(event["name"])
                elif event["kind"] in ("peer_lost", "peer_left", "peer_dismissed"):
                    here.discard(event["name"])
            return len(here) > self.stages and history.newest.step > began and history.step > history.newest.step + 2

        self._wait(calm, "the run had no spare or no new snapshot")

    def _step(self) -> int:
        return _history(self._running.folder).step

    def _holder(self, stage: int) -> str:
        peer = _history(self._running.folder).holders[stage]
        [name] = {str(e["name"]) for e in self._events() if e["kind"] == "peer_joined" and e["peer"] == peer}
        return name

    def _events(self) -> list[dict[str, Any]]:
        lines = (self._running.folder / "events.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _found(self, kind: str, since: float = 0.0, **fields: Any) -> dict[str, Any] | None:
        """The first event of this kind with these fields."""
        events = (e for e in self._events() if e["kind"] == kind and e["at"] >= since)
        return next((e for e in events if fields.items() <= e.items()), None)

    def _wait(self, what: Callable[[], Any], why: str) -> Any:
        until = time.monotonic() + PATIENCE
        while not (found := what()):
            if self._running.coordinator.poll() is not None:
                raise self._running.failure()
            if time.monotonic() > until:
                raise UserError(
                    f"{why} within {duration(PATIENCE)}", f"look into {self._running.folder}/logs", "no_recovery"
                )
            time.sleep(0.1)
        return found


def snapshots(turns: int) -> dict[str, Any]:
    """The demo with a snapshot every so many steps, and without any, in turns.

    What counts is found within one run: two equal ones differ by more than snapshots cost."""
    rows = []
    for turn in range(turns):
        row = {}
        for name in ("without", "with") if turn % 2 else ("with", "without"):
            interval = INTERVAL if name == "with" else 0
            summary, steps = pipeline(small(steps=200, snapshots={"interval": interval}))
            row[name] = {
                "seconds": summary["seconds"],
                "beside": beside(steps),
                "at_the_end_s": summary["seconds"] - sum(steps),
            }
        rows.append(row)

    def median(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(of, rows))

    return {
        "interval": INTERVAL,
        "cost": median(lambda row: row["with"]["beside"]),
        "cost_without": median(lambda row: row["without"]["beside"]),
        "cost_run_against_run": median(lambda row: row["with"]["seconds"] / row["without"]["seconds"] - 1),
        "at_the_end_s": median(lambda row: row["with"]["at_the_end_s"]),
        "rows": rows,
    }


def beside(steps: list[float]) -> float:
    """How much longer the steps beside a snapshot take than the others, as a share of all. Each place between two
    snapshots counts with its median."""
    places = [statistics.median(steps[INTERVAL - 1 + i :: INTERVAL]) for i in range(INTERVAL)]
    usual = statistics.median(places[BESIDE:])
    return sum(place - usual for place in places[:BESIDE]) / (INTERVAL * usual)


def journal(turns: int) -> dict[str, Any]:
    """How soon a coordinator is back, of a run that is new and of one with a million steps in its journal; and the most
    memory that it has had, also while it served peers."""
    spec = small(steps=2 * LONG)
    with tempfile.TemporaryDirectory() as name, local_run(spec, Path(name) / "run") as running:
        path = running.folder / JOURNAL
        while _history(running.folder).step < BUSY:  # until nobody is busy starting, and peers have been served
            time.sleep(0.1)
        memory = peak_memory_of(running.coordinator.pid)
        for process in (running.coordinator, *running.peers.values()):  # whose own work would be measured too
            process.kill()
            process.wait()
        new = [_restart(running) for _ in range(turns)]
        _fill(path, run_of(running.folder)[1])
        began = time.monotonic()
        assert _history(running.folder).step == LONG
        reading = time.monotonic() - began
        again = [_restart(running) for _ in range(turns)]
        return {
            "steps": LONG,
            "journal_bytes": path.stat().st_size,
            "read_seconds": reading,
            "restart_seconds": min(turn["wall"] for turn in again),
            "restart_median_seconds": statistics.median(turn["wall"] for turn in again),
            "restart_bound_seconds": RESTART_BOUND,
            "restart_cpu_seconds": min(turn["cpu"] for turn in again),
            "restart_new_run_seconds": min(turn["wall"] for turn in new),
            "coordinator_memory_bytes": max(memory, *(turn["memory"] for turn in again)),
            "coordinator_memory_bound_bytes": MEMORY_BOUND,
            "rows": again,
        }


def _fill(path: Path, identity: RunIdentity) -> None:
    """Up to a million steps, a hundred to a write."""
    with contextlib.closing(Journal(path, identity)) as long:
        for first in range(long.history.step + 1, LONG + 1, 100):
            steps = range(first, min(first + 100, LONG + 1))
            long.append([Decided(s, True, 1e-3, 1.0, 3.0, 1.0, 1, 10, 20) for s in steps], time.time())


def _history(folder: Path) -> History:
    return read(folder / JOURNAL, run_of(folder)[1])[0]


def _restart(running: LocalRun) -> dict[str, float]:
    """A coordinator, until it has read its journal and opened its door; then it is killed again. The processor's time
    tells what others on a busy machine took from it."""
    link, began = running.folder / "link", time.monotonic()
    before = os.stat(link).st_mtime_ns
    running.start_again("coordinator")
    while os.stat(link).st_mtime_ns == before:
        if running.coordinator.poll() is not None:
            raise running.failure()
        time.sleep(0.01)
    wall, used = time.monotonic() - began, psutil.Process(running.coordinator.pid).cpu_times()
    memory = peak_memory_of(running.coordinator.pid)
    running.coordinator.kill()
    running.coordinator.wait()
    return {"wall": wall, "cpu": used.user + used.system, "memory": memory}


PARTS = {"takeover": takeover, "snapshots": snapshots, "journal": journal}


def in_words(name: str, found: dict[str, Any]) -> str:
    if name == "snapshots":
        with_any = ", ".join(f"{row['with']['beside']:+.1%}" for row in found["rows"])
        without = ", ".join(f"{row['without']['beside']:+.1%}" for row in found["rows"])
        return (
            f"a snapshot every {found['interval']} steps costs {found['cost']:+.1%} of the time: steps during one "
            f"against the other steps of the same run ({with_any}; the same steps in runs without any: {without}), and "
            f"{duration(found['at_the_end_s'])} after the last step. "
            f"Run against run: {found['cost_run_against_run']:+.1%}"
        )
    if name == "journal":
        return (
            f"after {found['steps']:,} journalled steps ({size(found['journal_bytes'])}, read in "
            f"{duration(found['read_seconds'])}) a coordinator restarts in {duration(found['restart_seconds'])} "
            f"(best of {len(found['rows'])}; median {duration(found['restart_median_seconds'])}; bound "
            f"{duration(found['restart_bound_seconds'])}), {duration(found['restart_cpu_seconds'])} of it CPU "
            f"time; that of a new run in {duration(found['restart_new_run_seconds'])}. Both use at most "
            f"{size(found['coordinator_memory_bytes'])} of memory "
            f"(bound {size(found['coordinator_memory_bound_bytes'])})"
        )
    rows = [
        f"  {row['fault']:<8}  stage {row['stage']} at step {row['step']:>4}: "
        f"noticed after {duration(row['noticed_s'])}, next step granted after {duration(row['next_step_s'])}"
        for row in found["rows"]
    ]
    return "\n".join([f"with a spare and a lease of {duration(found['lease_s'])}:", *rows])
