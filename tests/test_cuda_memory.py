"""A stage's memory on a CUDA device: the forecast beside torch's own peak, and a limit that holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import make_spec

from protomodels_cli.cost.memory import StageMemory, least_in_flight
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.shape import slices
from protomodels_cli.model.stage import InFlight, Stage
from protomodels_cli.model.trainer import StageTrainer
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.troubles import OutOfMemory
from protomodels_cli.worker import device as devices
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.computing import Chooser
from protomodels_cli.worker.device import computation_of

pytestmark = pytest.mark.cuda


def a_spec(form: str, dtype: str, recompute: str, anchor: str = "fixed") -> RunSpec:
    """Large enough that the libraries' workspaces (some 40 MiB) do not count for much."""
    return make_spec(
        stages=3,
        model={"layers": 6, "width": 2048, "heads": 16, "kv_heads": 4, "hidden": 5632, "context": 2048},
        subspace={"form": form, "k": 32, "anchor": anchor},
        optimizer={"name": "adamw"},
        batch={"size": 16, "microbatches": 8},
        tokenizer={"kind": "bpe", "vocab_size": 32_000},
        compute={"dtype": dtype, "recompute": recompute},
    )


def work(spec: RunSpec, index: int, held: int, device: torch.device) -> None:
    """Two steps of a stage, with as many microbatches in flight as it may hold. Its weights are not drawn: that takes
    seconds, and changes no size."""
    basis = initial_basis(spec.model.width, spec.subspace.k, 0) if spec.form.has_basis else None
    trainer = StageTrainer(spec, slices(spec)[index], basis, device, spec.compute.recompute, draw=False)
    stage, rows = trainer.stage, spec.batch.size // spec.batch.microbatches
    stage.warm_up(rows, spec.model.context)
    for step in (1, 2):
        trainer.begin(step)
        flights: list[Any] = []
        for _ in range(2 * held):  # so that all gradients are there while as many as may be are in flight
            if len(flights) == held:
                _finish(stage, flights.pop(0))
            tokens = torch.randint(spec.vocab_size, (rows, spec.model.context), device=device)
            message = torch.randn(rows, spec.model.context, spec.boundary_width, device=device)
            flights.append(stage.run_forward(tokens, None if index == 0 else message))
        while flights:
            _finish(stage, flights.pop(0))
        trainer.prepare()
        trainer.decide(step, True, 1e-4, 1.0)


def _finish(stage: Stage, flight: InFlight) -> None:
    if stage.slice.is_last:
        stage.run_loss(flight, flight.tokens, 1e-5)
    else:
        stage.run_backward(flight, torch.randn_like(flight.output))


@pytest.mark.parametrize(("form", "anchor"), [("reparam", "fixed"), ("dense", "fixed"), ("two_stream", "segment")])
@pytest.mark.parametrize(
    ("dtype", "recompute"), [("bf16", "none"), ("bf16", "stage"), ("bf16", "block"), ("float32", "none")]
)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_forecast_is_near_the_devices_own_peak(form, anchor, dtype, recompute, index):
    spec, device = a_spec(form, dtype, recompute, anchor), torch.device("cuda:0")
    part, held = slices(spec)[index], least_in_flight(spec, 2 - index)
    first, end, computation = part.first_layer, part.end_layer, computation_of(spec, device)
    said = StageMemory(spec).with_recompute(first, end, recompute, held, computation)
    torch.cuda.init()
    gc.collect()  # or what an earlier test left is freed while this one is measured
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work(spec, index, held, device)
    measured = torch.cuda.max_memory_allocated(device) - before
    print(f"{form} {dtype} {recompute} stage {index}: said {said / 2**20:.0f} MiB, {said / measured:.3f} of the peak")
    assert 0.95 * measured <= said <= 1.1 * measured


def test_more_than_the_limit_is_refused_whatever_is_free():
    device = torch.device("cuda:0")
    torch.cuda.init()
    torch.cuda.empty_cache()  # or what earlier tests left would do
    used = torch.cuda.memory_reserved(device)
    try:
        devices.limit_memory(device, used + (1 << 30))
        torch.empty(1 << 28, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(1 << 31, dtype=torch.uint8, device=device)
        assert isinstance(devices.as_problem(caught.value).problem, OutOfMemory)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_peer_reports_what_torch_had_on_its_device():
    device = torch.device("cuda:0")
    assert devices.card(device)
    spec = a_spec("reparam", "bf16", "auto")
    chooser = Chooser(Cards.of([device], spec))
    found = chooser.pick(spec, slices(spec)[0], 0)
    block = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    used = chooser.memory_used()
    assert block.nbytes <= used["peak_memory"] <= used["reserved_memory"]
    assert used["forecast_memory"] == found.bytes
