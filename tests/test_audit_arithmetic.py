"""Machines that compute otherwise, through the audit's own code: honest ones are cleared, liars are not. On CPUs; what
a GPU computes is in test_cuda_audit.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from audited_steps import LIE, WARM_UP, Peers, a_spec, audit

CPU = torch.device("cpu")
KINDS = [
    ("bf16", "float32", "int8"),
    ("float32", "bf16", "int8"),
    ("float32", "bf16", "int4"),
    ("float32", "float32", "int8"),
]


@pytest.mark.full
@pytest.mark.parametrize(("theirs", "ours", "wire"), KINDS)
def test_honest_stages_are_cleared_and_liars_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str, wire: str
):
    peers, by = Peers(a_spec(wire, dtype=theirs), CPU), a_spec(wire, dtype=ours)
    for step in range(1, 1 + WARM_UP):
        peers.take_step(step)
    honest = audit(peers, by, CPU, 2, tmp_path, monkeypatch)
    lies = audit(peers, by, CPU, 1, tmp_path, monkeypatch, lie=LIE)
    print(f"{theirs} by {ours}, {wire}\nhonest: {honest}\nlies: {lies}")
    assert not any(one.is_lie for one in honest.compared), honest
    assert all(one.is_lie for one in lies.compared), lies
