"""A stage over several devices where there is one GPU: as two halves of it, and with the CPU, to which tensors really
move. Two GPUs were never at hand."""

from __future__ import annotations

import pytest
import torch
from conftest import make_spec
from cuda_tools import pin, take_step
from test_devices import MOVES, halves, over, reference_of

from protomodels_cli.bench.loopback import pipeline_rows
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.shape import slices
from protomodels_cli.model.state import on_host
from protomodels_cli.model.trainer import StageTrainer
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.stage_work import StageWork
from protomodels_cli.worker.transfers import CudaTransfers

pytestmark = pytest.mark.cuda
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def losses(reference):
    return [row["loss"] for row in reference.train() if row["event"] == "step"]


@pytest.mark.parametrize(
    ("form", "optimizer", "recompute"),
    [("reparam", "adamw", "stage"), ("constrained", "muon", "block"), ("dense", "adamw", "none")],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-3), ("bf16", 2e-2)])
def test_losses_follow_those_of_one_device(form, optimizer, recompute, dtype, tolerance):
    sections = {
        "steps": 16,  # U moves three times
        "subspace": {"form": form, **({} if form == "dense" else MOVES)},
        "optimizer": {"name": optimizer},
        "compute": {"dtype": dtype, "recompute": recompute},
    }
    right = losses(reference_of(CUDA, **sections))
    for second in (CUDA, CPU):
        found = over(reference_of(CUDA, **sections), CUDA, second)
        assert [[s.device for s in stage.sections] for stage in found.stages] == 2 * [[CUDA, second]]
        assert losses(found) == pytest.approx(right, rel=tolerance)


@pytest.mark.parametrize("second", [CUDA, CPU])
def test_a_snapshot_has_what_lies_on_either_device_and_is_of_its_step(second):
    spec = make_spec(stages=2, model={"width": 256, "hidden": 512})
    slice_, basis = slices(spec)[0], initial_basis(256, spec.subspace.k, spec.seed)
    t = StageTrainer(spec, slice_, basis, halves(slice_.layers, CUDA, second))
    transfers = CudaTransfers(*t.stage.devices)
    take_step(t, transfers, 1)
    pin(t, transfers)
    right = on_host(t.state({}))
    wait = transfers.copy(t.state({}))
    take_step(t, transfers, 2)
    found = wait()
    assert all(torch.equal(found[name], right[name]) for name in right)
    restored = StageWork(spec, slice_, None, halves(slice_.layers, CUDA, second), found, step=1)
    again = on_host(restored.trainer.state({}))
    assert all(torch.equal(again[name], right[name]) for name in right)


def test_memory_of_a_card_that_is_named_twice_counts_once():
    spec = make_spec()
    one, two = Cards.of([CUDA], spec), Cards.of([CUDA, CUDA], spec)
    assert (two.free, two.ids) == (one.free, one.ids)
    assert sum(two.rooms) <= one.free
    assert two.memory_used() == one.memory_used()


def test_peers_over_two_halves_of_a_card_follow_the_reference():
    spec = make_spec(stages=2, steps=25, compute={"dtype": "float32"})
    right = losses(reference_of(CUDA, steps=25, compute={"dtype": "float32"}))
    _, rows = pipeline_rows(spec, device="auto", join_options=["--devices", "0,0"])
    assert [row["loss"] for row in rows] == pytest.approx(right, rel=1e-3)
