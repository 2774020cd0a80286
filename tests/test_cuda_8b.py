"""Stages of LLaMA 8B on a card of 16 or 24 GB: real steps under a cap of torch's allocator, beside the forecast.

`pytest -rA tests/test_cuda_8b.py` prints what each took and was said to take.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import make_spec

from protomodels_cli.bench.lone_stage import Neighbours, messages, take_step
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.recompute import Picked, pick
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.shape import slices
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.worker.device import computation_of
from protomodels_cli.worker.stage_work import StageWork

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda:0")
UNEVEN = [3, 4, 4, 4, 3, 3, 3, 3, 3, 2]


def llama_8b(stages: int | list[int], form: str) -> RunSpec:
    return make_spec(
        stages=stages,
        model={
            "layers": 32,
            "width": 4096,
            "heads": 32,
            "kv_heads": 8,
            "hidden": 14336,
            "context": 4096,
            "rope_theta": 500_000.0,
        },
        subspace={"form": form, "k": 64},
        optimizer={"name": "adamw", "lr": 1e-5},
        batch={"size": 8, "microbatches": 8},
        tokenizer={"kind": "bpe", "vocab_size": 128_256},
        wire={"forward": "int8", "backward": "int8"},
    )


@pytest.fixture
def capped():
    """A card with no more memory than it is given."""

    def cap(size: float) -> None:
        torch.cuda.init()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(CUDA).total_memory)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("stages", "index", "gigabytes", "form"),
    [
        (32, 0, 16, "reparam"),
        (32, 15, 16, "reparam"),
        (32, 31, 16, "reparam"),
        (32, 0, 16, "dense"),
        (32, 15, 16, "dense"),
        (32, 31, 16, "dense"),
        (UNEVEN, 0, 24, "reparam"),
        (UNEVEN, 2, 24, "reparam"),
        (UNEVEN, 9, 24, "reparam"),
    ],
)
def test_a_stage_of_8b_trains_within_its_card(capped: Any, stages, index, gigabytes, form):
    spec, room = llama_8b(stages, form), gigabytes * 10**9
    part, after = slices(spec)[index], len(slices(spec)) - 1 - index
    found: Picked = pick(StageMemory(spec), part.first_layer, part.end_layer, after, computation_of(spec, CUDA), room)
    capped(room)
    basis = initial_basis(spec.model.width, spec.subspace.k, 0) if spec.form.has_basis else None
    work = StageWork(spec, part, basis, CUDA, recompute=found.recompute)
    around = Neighbours(spec, index)
    for step in (1, 2):
        take_step(work, messages(around, step, spec.batch.microbatches), found.in_flight)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(
        f"| {form} | {len(slices(spec))} stages, no. {index}: {part.end_layer - part.first_layer} layers | {gigabytes} "
        f"| {found.recompute}, {found.in_flight} | {peak / 1e9:.2f} | {reserved / 1e9:.2f} | {found.bytes / 1e9:.2f} "
        f"| {found.bytes / peak:.2f} |"
    )
    assert work.not_compiled is None
    assert reserved <= room
    assert 0.95 * peak <= found.bytes <= 1.1 * peak
