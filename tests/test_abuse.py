"""The abuse benchmark: how its phases are compared, and a short attack on a coordinator that leads a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import psutil
import pytest
from door_tools import needs_two_addresses
from scene import a_spec
from waiting import PATIENCE

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.bench import quota
from protomodels_cli.bench.abuse import MEMORY_BOUND, compared, in_words
from protomodels_cli.bench.attack import READY, Order
from protomodels_cli.spec import spec_from
from protomodels_cli.spec.link import parse_link
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.tls import new_key, public_key_of


def phase(kind: str, began: float, memory: int = 100, join: float | None = 1.0, busy: float = 0.2) -> dict[str, Any]:
    attack = {"nonsense": 10_000} if kind != "nobody" else {}
    row = {"kind": kind, "began": began, "ended": began + 10, "memory_bytes": memory, "join_s": join}
    row |= {"run_cores": busy * (os.cpu_count() or 1), "attack": attack}
    return row | {"attack_seconds": 10.0, "attacker_cores": 0.4, "quota": "test", "quota_cores": 0.5}


def steps(began: float, seconds: float) -> list[dict[str, float]]:
    return [{"at": began + (i + 1) * seconds, "seconds": seconds} for i in range(int(9 / seconds))]


@pytest.mark.parametrize(
    ("door_step", "memory", "join", "busy", "within"),
    [
        (1.05, 100 + MEMORY_BOUND, 9.9, 0.3, True),
        (1.15, 100, 1.0, 0.2, False),
        (1.0, 101 + MEMORY_BOUND, 1.0, 0.2, False),
        (1.0, 100, 10.1, 0.2, False),
        (1.0, 100, None, 0.2, False),
        (1.0, 100, 1.0, 0.35, False),
    ],
)
def test_phases_are_compared_with_the_same_attack_elsewhere(
    door_step: float, memory: int, join: float | None, busy: float, within: bool
):
    phases = [phase("nobody", 0, busy=busy), phase("elsewhere", 20), phase("door", 40, memory, join)]
    found = compared([*steps(0, 0.5), *steps(20, 1.0), *steps(40, door_step), *steps(60, 99.0)], phases)
    assert found["slowed"] == pytest.approx(door_step - 1)
    assert found["within"] is within
    assert found["messages_per_s"] == 1000
    rest = {"setting": {"connections": 1, "slow": 1, "link": "x"}, "steps_redone": 0, "generations": 0}
    assert str(found["door"]["steps"]) in in_words({**found, **rest, "phases": phases})


@needs_two_addresses
@pytest.mark.full
@pytest.mark.timeout(900)  # its sixty steps take minutes beside other tests
def test_a_run_does_not_mind_all_attacks_at_once(scene):
    """Its links are slow, so that it lasts longer than the attack takes to begin. How soon a newcomer gets in is for
    `bench abuse` to say: on a busy machine that is a matter of the processor."""
    found = a_spec(limits={"connections": 256, "connections_per_address": 64, "lease_seconds": 30.0})
    spec = found.model_dump(mode="json") | {"steps": 60}
    spec["wire"]["link"] = parse_link("100mbit,60ms").model_dump()
    s = scene(spec_from(spec))
    s.start(3)
    link = JoinLink.parse((s.run_dir / "link").read_text())
    coordinator = psutil.Process(s.pool.coordinator.pid)
    before = coordinator.memory_info().rss
    key = public_key_of(new_key())
    request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=key).SerializeToString()
    order = Order(link.port, link.token, request.hex(), connections=100, slow=10, per_second=200.0)
    s.wait_for(lambda: s.events("snapshot_complete"), "it does not train")
    command = [sys.executable, "-m", "protomodels_cli.bench.attack", json.dumps(asdict(order))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as attack:
        assert attack.stdout is not None
        assert attack.stdout.readline().strip() == READY
        done = len(s.events("snapshot_complete"))
        assert not s.events("run_done"), "the run was over before all of the attack had begun"
        s.wait_for(lambda: len(s.events("snapshot_complete")) > done, "it does not train under attack")
        assert coordinator.memory_info().rss - before < MEMORY_BOUND
        summary = s.ends_well()
        attack.communicate("\n", timeout=PATIENCE)
    assert summary["generations"] == 1


@pytest.mark.parametrize("system", [True, False])
def test_a_process_has_no_more_than_its_share_of_a_core(system: bool, monkeypatch: pytest.MonkeyPatch):
    if not system:
        monkeypatch.setattr(quota, "_group", lambda share: (None, "SIGSTOP by processor time"))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            with quota.held(busy.pid, 0.2) as held:
                time.sleep(3)
                assert 0.02 < held.cores() < 0.3, held.how
        finally:
            busy.kill()
