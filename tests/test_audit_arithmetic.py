"""Machines that compute otherwise, through the audit's own code: honest ones are cleared, liars are not. On CPUs; what
a GPU computes is in test_cuda_audit.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from audited_steps import WARM_UP, Peers, a_spec, audit

CPU = torch.device("cpu")
KINDS = [("bf16", "float32"), ("float32", "bf16"), ("float32", "float32")]


@pytest.mark.parametrize(("theirs", "ours"), KINDS)
def test_honest_stages_are_cleared_and_liars_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str
):
    peers, by = Peers(a_spec("int8", dtype=theirs), CPU), a_spec("int8", dtype=ours)
    for step in range(1, 1 + WARM_UP):
        peers.take_step(step)
    honest = audit(peers, by, CPU, 3, tmp_path, monkeypatch)
    lies = audit(peers, by, CPU, 1, tmp_path, monkeypatch, lie=(0.01, 0.1))
    print(honest)
    assert not any(one.is_lie for one in honest.compared), honest
    assert all(one.is_lie for one in lies.compared), lies
