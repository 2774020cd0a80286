"""Real coordinators and peers for tests: processes that are started once and run one job after another.

What runs in them is pool_process.py; what goes wrong there is put in by injection.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path
from typing import Any

from marks import injected
from starting import Started
from waiting import wait_for


class Process:
    """One reusable process."""

    def __init__(self, log: Path):
        self._log = log.open("w")
        self.marks = log.parent / f"marks-of-{log.stem}"  # of faults that happen in its jobs
        self._fault = ""
        self._open()

    def _open(self) -> None:
        (jobs, put), (take, results) = os.pipe(), os.pipe()
        self._process = Started("pool_process", ["pool_process"], [jobs, results, self._log.fileno()])
        os.close(jobs)
        os.close(results)
        self._process.stdin = os.fdopen(put, "wb", buffering=0)
        self._process.stdout = os.fdopen(take, "rb", buffering=0)  # a line read leaves the next one to `select`
        self._busy = self._ready = False

    def renew(self) -> None:
        """A job that was left unfinished is ended with its process."""
        if self._busy or self._process.poll() is not None:
            self.kill()
            self._open()

    def start(self, **job: Any) -> None:
        """Begin a job."""
        self.renew()
        assert self._process.stdin is not None
        self._fault = job.get("fault", {}).get("kind", "")
        self._process.stdin.write(json.dumps({"marks": str(self.marks), **job}).encode() + b"\n")
        self._busy = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def wait_until_ready(self) -> None:
        """Until all is imported."""
        if not self._ready:
            self._ready = self._line(60)["ready"]

    def result(self, seconds: float = 120) -> dict[str, Any]:
        """What came of its job. A fault that the job was given must have happened, here or in another process."""
        self.wait_until_ready()
        result = self._line(seconds)
        self._busy = False
        if self._fault:
            injected(self.marks, self._fault)
        return result

    def _line(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            self.tell_what_it_does()
            raise AssertionError(f"no result after {seconds:g} s: {Path(self._log.name).read_text()[-6000:]}")
        line = self._process.stdout.readline()
        assert line, f"the process died: {Path(self._log.name).read_text()[-2000:]}"
        return json.loads(line)

    def tell_what_it_does(self) -> None:
        """The stacks of its threads, into its log."""
        if not self.gone:
            log = Path(self._log.name)
            before = log.stat().st_size
            os.kill(self.pid, signal.SIGUSR1)
            wait_for(lambda: log.stat().st_size > before or self.gone, "no stacks", 5)

    @property
    def at_work(self) -> bool:
        """Whether it has a job, and lives, and has not said what came of it."""
        if not self._busy or self.gone:
            return False
        self.wait_until_ready()
        said, _, _ = select.select([self._process.stdout], [], [], 0)
        return not said

    @property
    def stopped(self) -> bool:
        """By a signal, until another lets it go on."""
        return not self.gone and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=30)

    def close(self) -> None:
        self.kill()
        self._log.close()


class Pool:
    """A coordinator's process and four peers'."""

    def __init__(self, folder: Path, peers: int = 4):
        self.folder, self.runs = folder, 0
        self.coordinator = Process(folder / "coordinator.log")
        self.peers = [Process(folder / f"peer-{i}.log") for i in range(peers)]

    def start(self, spec: Any, peers: list[dict[str, Any]], **job: Any) -> Path:
        """Start a run with these peers (each a dict of job options). Returns its directory.

        All are ready before the first begins: a run is short, and a spare must not come after its end."""
        self.runs += 1
        processes = [self.coordinator, *self.peers[: len(peers)]]
        for process in processes:
            process.renew()
        for process in processes:
            process.wait_until_ready()
        run_dir = self.folder / f"run-{self.runs}"
        for process in (self.coordinator, *self.peers):
            process.marks = self.folder / f"marks-{self.runs}"
        self.coordinator.start(kind="coordinator", spec=spec.model_dump(mode="json"), run_dir=str(run_dir), **job)
        link = wait_for_link(run_dir)
        for i, options in enumerate(peers):
            self.peers[i].start(
                kind="join", **{"link": link, "name": f"peer-{i}", "dir": str(run_dir / f"p{i}"), **options}
            )
        return run_dir

    def run(
        self, spec: Any, peers: int | list[dict[str, Any]], **job: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A whole run: the coordinator's result and the peers'."""
        options = [{} for _ in range(peers)] if isinstance(peers, int) else peers
        run_dir = self.start(spec, options, **job)
        results = [p.result() for p in self.peers[: len(options)]]
        led = self.coordinator.result()
        if (run_dir / "summary.json").exists():
            led["summary"] = json.loads((run_dir / "summary.json").read_text())
        led["run_dir"] = run_dir
        return led, results

    def close(self) -> None:
        for process in (self.coordinator, *self.peers):
            process.close()


def wait_for_link(run_dir: Path) -> str:
    wait_for((run_dir / "link").exists, "no link")
    return (run_dir / "link").read_text().strip()
