"""The baseline trains the same model: real ranks on loopback against the reference."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import make_reference, make_spec

from protomodels_cli.bench.torch_pipelining import run
from protomodels_cli.bench.torch_rank import check
from protomodels_cli.errors import UserError

STEPS = 4


# A large rate and decay, a clip between the first step's norm and the second's, and an eps that makes Adam feel how
# large gradients are: so that each of them, and a gradient scaled wrongly, shows in the losses within a few steps.
DENSE: dict[str, Any] = {
    "stages": 3,
    "subspace": {"form": "dense"},
    "optimizer": {"name": "adamw", "lr": 3e-2, "weight_decay": 1.0, "eps": 1e-3, "clip": 1.5},
    "batch": {"size": 8, "microbatches": 4},
}


def reference_losses() -> list[float]:
    return [row["loss"] for row in make_reference(**DENSE).train(STEPS) if row["event"] == "step"]


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "wire", "stages"), [("interleaved", "bf16", 2), ("1f1b", "fp32", 3)])
def test_ranks_take_the_reference_s_steps(schedule: str, wire: str, stages: int, tmp_path: Path) -> None:
    result = run(make_spec(**{**DENSE, "stages": stages}), wire, STEPS, tmp_path, schedule=schedule)
    assert result["losses"] == pytest.approx(reference_losses(), rel=1e-5 if wire == "fp32" else 1e-3)
    assert len(result["step_seconds"]) == STEPS
    assert result["tokens_per_s"] > 0
    assert result["cpu_seconds"] > 0
    types = [json.loads((tmp_path / f"torch-{rank}.json").read_text())["received_types"] for rank in range(stages)]
    assert types == [["torch.float32" if wire == "fp32" else "torch.bfloat16"]] * stages


def test_a_rank_that_fails_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    def command(rank: int, argv: list[str]) -> list[str]:
        alive = tmp_path / f"alive-{rank}"
        fails = f"until [ -e {tmp_path}/alive-0 -a -e {tmp_path}/alive-2 ]; do sleep 0.01; done; echo no memory; exit 7"
        return ["sh", "-c", fails if rank == 1 else f"echo $$ > {alive}.new; mv {alive}.new {alive}; exec sleep 60"]

    with pytest.raises(UserError, match=r"rank 1 .* 7: no memory\n") as failed:
        run(make_spec(**DENSE), "fp32", STEPS, tmp_path, command)
    assert failed.value.kind == "process_failed"
    for rank in (0, 2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"alive-{rank}").read_text()), 0)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"subspace": {"form": "reparam"}}, "subspace.form .* reparam"),
        ({"subspace": {"form": "dense", "anchor": "segment"}}, "subspace.anchor .* segment"),
        ({"groups": {"head": {"lr": 1e-4}}}, "groups"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name .* muon"),
        ({"stages": 4, "batch": {"size": 4, "microbatches": 2}}, "4 stages .* 2 microbatches"),
    ],
)
def test_what_torch_cannot_run_is_refused(sections: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        check(make_spec(**{**DENSE, **sections}))
