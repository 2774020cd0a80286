"""Audits between a GPU and a CPU: honest stages are cleared in either direction, liars are found. `pytest -s` shows how
far the two are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from audited_steps import LIE, WARM_UP, Peers, a_spec, audit

pytestmark = pytest.mark.cuda
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
STEPS = 2  # of three stages, each audited with its four messages
ON_GPU: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16", "compile": "never"},
    "bf16, compiled": {"dtype": "bf16", "compile": "always"},
    "tf32": {"dtype": "tf32", "compile": "never"},
    "float32": {"dtype": "float32", "compile": "never"},
    "float32, compiled": {"dtype": "float32", "compile": "always"},
}
ON_CPU = {"dtype": "float32", "compile": "never"}
WIRES = ["fp32", "int8", "int4"]


def check(peers: Peers, by: dict[str, Any], at: torch.device, wire: str, folder: Path, patch: Any) -> None:
    """Honest steps are cleared, and lies are found in every message."""
    for step in range(1, 1 + WARM_UP):
        peers.take_step(step)
    spec = a_spec(wire, **by)
    honest = audit(peers, spec, at, STEPS, folder, patch)
    lies = audit(peers, spec, at, 1, folder, patch, lie=LIE)
    print(f"{peers.device} in {peers.arithmetic.name} by {at} {by}, {wire}\nhonest: {honest}\nlies: {lies}")
    assert not any(one.is_lie for one in honest.compared), honest
    assert all(one.is_lie for one in lies.compared), lies


def wires(how: str) -> list[str]:
    return WIRES if how.startswith("bf16") else WIRES[:1]


@pytest.mark.parametrize("how", ON_GPU)
def test_stages_on_a_gpu_are_audited_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    for wire in wires(how):
        check(Peers(a_spec(wire, **ON_GPU[how]), CUDA), ON_CPU, CPU, wire, tmp_path, monkeypatch)


@pytest.mark.parametrize("how", ON_GPU)
def test_stages_on_a_cpu_are_audited_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    for wire in wires(how):
        check(Peers(a_spec(wire, **ON_CPU), CPU), ON_GPU[how], CUDA, wire, tmp_path, monkeypatch)
