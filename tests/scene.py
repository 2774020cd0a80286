"""A run in the pool's processes for tests to disturb: it must end with the reference's weights all the same."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import make_spec
from pool import Pool
from test_pipeline import reference_of

from protomodels_cli.launch.cable import Cable
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.client import operator
from protomodels_cli.wire.join_link import JoinLink

WIRES = {
    "fp32": {},
    "int8": {"forward": "int8+ef21", "backward": "int8+ef21"},
}


def a_spec(wire: str = "fp32", limits: dict[str, Any] | None = None, **snapshots: Any) -> RunSpec:
    return make_spec(
        stages=3,
        steps=12,
        subspace={"sync_interval": 4, "update": {"interval": 4, "window": 2, "delay": 1}},
        snapshots={"interval": 3} | snapshots,
        limits={"lease_seconds": 2.0} | (limits or {}),
        wire=WIRES[wire],
        eval={"interval": 5},
    )


class Scene:
    """A run in the pool's processes, and what is done to it."""

    def __init__(self, pool: Pool, folder: Path, spec: RunSpec):
        self.pool, self.folder, self.spec = pool, folder, spec
        self.marks = 0

    def fail_at(self, phase: str, stage: int = 0, step: int = 0, signal: str = "SIGKILL") -> dict[str, Any]:
        """A fault for every process that could come to that point; the first that does gets the signal."""
        self.mark = self.folder / f"failed-{self.marks}"
        self.marks += 1
        return {
            "kind": "fail_at",
            "phase": phase,
            "stage": stage,
            "step": step,
            "signal": signal,
            "once": str(self.mark),
        }

    def start(
        self, peers: int, fault: dict[str, Any] | None = None, coordinator_fault: dict[str, Any] | None = None
    ) -> None:
        """`fault` is every peer's."""
        self.run_dir = self.pool.start(self.spec, [{"fault": fault or {}}] * peers, fault=coordinator_fault or {})
        self.peers = list(range(peers))

    def join(self, i: int, through: Cable | None = None) -> None:
        """A peer that has just been killed, or a new one: its files are where they were."""
        link = JoinLink.parse((self.run_dir / "link").read_text())
        link = through.through(link) if through else link
        self.pool.peers[i].start(kind="join", link=str(link), name=f"peer-{i}", dir=str(self.run_dir / f"p{i}"))
        if i not in self.peers:
            self.peers.append(i)

    def dead(self) -> list[int]:
        """Peers whose process is gone, once one is."""
        return [i for i in self.peers if self.pool.peers[i].gone]

    def wait_for(self, what: Callable[[], Any], why: str, seconds: float = 60) -> Any:
        until = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < until, f"{why}; {self.events()[-600:]}"
            time.sleep(0.02)
        return found

    def wait_for_mark(self) -> None:
        self.wait_for(self.mark.exists, "the fault did not come")

    def events(self) -> str:
        file = self.run_dir / "events.jsonl"
        return file.read_text() if file.exists() else ""

    def status(self) -> Any:
        async def ask() -> Any:
            async with operator(JoinLink.parse((self.run_dir / "link").read_text())) as coordinator:
                return await coordinator.status()

        return asyncio.run(ask())

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.status().step >= step, f"step {step} did not come")

    def holder(self, stage: int) -> int:
        """Which of the peers holds it."""
        return int(self.status().stages[stage].holders[0].name.removeprefix("peer-"))

    def restart_coordinator(self) -> None:
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
        return summary


_expected: dict[str, str] = {}


def expected(spec: RunSpec) -> str:
    key = spec.sha256()
    if key not in _expected:
        _expected[key] = reference_of(spec)[0].weights_sha256()
    return _expected[key]
