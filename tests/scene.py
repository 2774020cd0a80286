"""A run in the pool's processes for tests to disturb: it must end with the reference's weights all the same."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from conftest import make_spec
from marks import injected, marks, write_mark
from pool import Pool, Process
from test_pipeline import reference_of
from told import events, status_of
from waiting import wait_for

from protomodels_cli.launch.cable import Cable
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.join_link import JoinLink

NOT_MARKED = ("seconds", "once")  # options of faults that say how, not where
MOVING = {"sync_interval": 4, "update": {"interval": 4, "window": 2, "delay": 1}}
METHODS: dict[str, dict[str, Any]] = {
    "fp32": {"subspace": MOVING},
    "int8": {"subspace": MOVING, "wire": {"forward": "int8+ef21", "backward": "int8+ef21"}},
    "two streams": {
        "subspace": {"sync_interval": 4, "form": "two_stream", "anchor": "segment"},
        "wire": {"forward": "int8", "backward": "int8"},
        "model": {"segments": 4},
    },
}


def a_spec(method: str = "fp32", limits: dict[str, Any] | None = None, **snapshots: Any) -> RunSpec:
    return make_spec(
        stages=3,
        steps=12,
        snapshots={"interval": 3} | snapshots,
        limits={"lease_seconds": 2.0, "connections_per_address": 1024} | (limits or {}),  # tests ask without rest
        eval={"interval": 5},
        **METHODS[method],
    )


class Scene:
    """A run in the pool's processes, and what is done to it."""

    def __init__(self, pool: Pool, folder: Path, spec: RunSpec):
        self.pool, self.folder, self.spec = pool, folder, spec
        self._asked_for: list[dict[str, Any]] = []

    def fail_at(self, phase: str, stage: int = 0, step: int = 0, signal: str = "SIGKILL") -> dict[str, Any]:
        """A fault for every process that could come to that point; the first that does gets the signal."""
        return {"kind": "fail_at", "phase": phase, "stage": stage, "step": step, "signal": signal}

    def start(
        self, peers: int, fault: dict[str, Any] | None = None, coordinator_fault: dict[str, Any] | None = None
    ) -> None:
        """`fault` is every peer's."""
        self.run_dir = self.pool.start(self.spec, [{"fault": fault or {}}] * peers, fault=coordinator_fault or {})
        self.peers = list(range(peers))
        self._asked_for = [f for f in (fault, coordinator_fault) if f]

    def join(self, i: int, through: Cable | None = None, fault: dict[str, Any] | None = None) -> None:
        """A peer that has just been killed, or a new one: its files are where they were."""
        link = JoinLink.parse((self.run_dir / "link").read_text())
        link = through.through(link) if through else link
        folder = str(self.run_dir / f"p{i}")
        self.pool.peers[i].start(kind="join", link=str(link), name=f"peer-{i}", dir=folder, fault=fault or {})
        if i not in self.peers:
            self.peers.append(i)

    def dead(self) -> list[int]:
        """Peers whose process is gone, once one is."""
        return [i for i in self.peers if self.pool.peers[i].gone]

    def wait_for(self, what: Callable[[], Any], why: str) -> Any:
        return wait_for(what, why, details=lambda: str([e["text"] for e in self.events()][-10:]))

    # Faults

    def wait_for_fault(self, kind: str) -> dict[str, Any]:
        """Until a fault that was asked for has happened: its mark."""
        return self.wait_for(lambda: marks(self._marks, kind), f"the fault {kind} did not happen")[0]

    def marks(self, kind: str) -> list[dict[str, Any]]:
        return marks(self._marks, kind)

    @property
    def _marks(self) -> Path:
        return self.pool.coordinator.marks

    def _mark(self, kind: str, **what: Any) -> None:
        """Of what this process does to the others."""
        self._asked_for.append({"kind": kind, **what})
        write_mark(self._marks, kind, **what)

    def kill(self, i: int) -> None:
        """A peer, in the middle of the run."""
        self._kill(self.pool.peers[i], f"peer-{i}")

    def kill_coordinator(self) -> None:
        self._kill(self.pool.coordinator, "coordinator")

    def _kill(self, process: Process, name: str) -> None:
        assert process.at_work, f"{name} had ended before it could be killed"
        process.kill()
        assert process.exit_status == -signal.SIGKILL, f"{name} ended by itself"
        self._mark("kill", process=name)

    def go_on(self) -> None:
        """Let the one go on that a signal has stopped."""
        [stopped] = [i for i in self.peers if self.pool.peers[i].stopped]
        os.kill(self.pool.peers[stopped].pid, signal.SIGCONT)
        self._mark("go on", process=f"peer-{stopped}")

    def cut(self, line: Cable) -> None:
        """In the middle of the run."""
        before = self.status()
        assert before.step < self.spec.steps, "the run was over before the line could be cut"
        line.cut()
        self._mark("cut line", step=before.step)

    def damage(self, path: Path, how: str) -> None:
        """A file of the run's: truncated, with a bit flipped, or not to be read at all."""
        content = path.read_bytes()
        if how == "unreadable":
            path.unlink()
            path.mkdir()
        else:
            flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
            path.write_bytes(content[: len(content) // 2] if how == "truncated" else flipped)
            assert path.read_bytes() != content
        self._mark("damage", path=str(path), how=how)

    def check_faults(self) -> None:
        """All that was asked for has happened, and before the run was over."""
        ended = (self.run_dir / "summary.json").stat().st_mtime
        for fault in self._asked_for:
            where = {name: value for name, value in fault.items() if name not in ("kind", *NOT_MARKED)}
            found = injected(self._marks, fault["kind"], **where)
            assert found["at"] < ended, f"{fault} happened after the end of the run"

    # What can be seen of the run

    def events(self, kind: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """What the coordinator told, of this kind and with these fields."""
        return events(self.run_dir, kind, **fields)

    def reasons(self, kind: str) -> list[str]:
        """The kinds of the reasons for these events."""
        return [e["reason"]["kind"] for e in self.events(kind)]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """What the journal has of this kind."""
        with closing(sqlite3.connect(self.run_dir / "journal.sqlite")) as db:
            return [json.loads(body) for (body,) in db.execute("SELECT body FROM records WHERE kind = ?", (kind,))]

    def status(self) -> Any:
        return status_of(self.run_dir)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.status().step >= step, f"step {step} did not come")

    def holder(self, stage: int) -> int:
        """Which of the peers holds it."""
        return int(self.status().stages[stage].holders[0].name.removeprefix("peer-"))

    def restart_coordinator(self) -> None:
        assert self.pool.coordinator.gone, "it was not killed"
        self.pool.coordinator.start(
            kind="coordinator", spec=self.spec.model_dump(mode="json"), run_dir=str(self.run_dir)
        )

    def ends_well(self) -> dict[str, Any]:
        try:
            led = self.pool.coordinator.result()
        except AssertionError:
            for i in self.peers:
                self.pool.peers[i].tell_what_it_does()
            raise
        assert led["exit"] == 0, led
        for i in self.peers:
            if not self.pool.peers[i].gone:
                ended = self.pool.peers[i].result()
                assert ended["exit"] == 0, ended
        summary = json.loads((self.run_dir / "summary.json").read_text())
        assert summary["weights_sha256"] == expected(self.spec)
        self.check_faults()
        return summary


_expected: dict[str, str] = {}


def expected(spec: RunSpec) -> str:
    key = spec.sha256()
    if key not in _expected:
        _expected[key] = reference_of(spec)[0].weights_sha256()
    return _expected[key]
