"""A stage on a CUDA device: its arithmetic, what it computes again, and what travels beside its queue."""

import contextlib
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_spec
from cuda_tools import pin, take_step

from protomodels_cli.bench.loopback import pipeline_rows
from protomodels_cli.codecs import Carrier, End
from protomodels_cli.codecs.base import Slot
from protomodels_cli.codecs.eden import Eden
from protomodels_cli.data.prepare import prepare
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.products import add_product
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.shape import slices
from protomodels_cli.model.state import on_host
from protomodels_cli.model.trainer import StageTrainer
from protomodels_cli.protocol.messages import BadMessage, MessageKey
from protomodels_cli.worker.pinning import HostMemory
from protomodels_cli.worker.transfers import CudaTransfers, Transfers

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda:0")


def trainer(slice_=0, recompute="none", **sections):
    spec = make_spec(stages=2, **sections)
    basis = initial_basis(spec.model.width, spec.subspace.k, spec.seed) if spec.form.has_basis else None
    return spec, StageTrainer(spec, slices(spec)[slice_], basis, CUDA, recompute)


def losses_of(spec, device):
    return [
        row["loss"] for row in Reference(spec, prepare(spec), Carrier(spec), device).train() if row["event"] == "step"
    ]


def test_gradients_are_summed_in_float32():
    weight = torch.nn.Parameter(torch.zeros(8, 8, device=CUDA))
    one = torch.ones(1, 8, dtype=torch.bfloat16, device=CUDA)
    for _ in range(600):
        add_product(weight, one, one)
    assert weight.grad.dtype == torch.float32
    assert (weight.grad == 600).all()


@pytest.mark.parametrize("form", ["reparam", "dense"])
def test_auto_is_compiled_bf16_and_follows_float32(form):
    spec = make_spec(subspace={"form": form}, steps=20)
    right = losses_of(make_spec(subspace={"form": form}, steps=20, compute={"dtype": "float32"}), "cpu")
    r = Reference(spec, prepare(spec), Carrier(spec), CUDA)
    assert {(s.arithmetic.name, s.arithmetic.compiled) for s in r.stages} == {("bf16", True)}
    found = [row["loss"] for row in r.train() if row["event"] == "step"]
    assert all(s.running is not s.eager for s in r.stages)
    assert found == pytest.approx(right, rel=1e-2)


@contextlib.contextmanager
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("form", ["reparam", "constrained", "dense"])
@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_what_is_computed_again_is_the_same(monkeypatch, form, recompute):
    """The first stage: its forward bit for bit, and under deterministic algorithms its gradients too."""
    with deterministic(monkeypatch):
        found = []
        for how in ("none", recompute):
            spec, t = trainer(recompute=how, subspace={"form": form})
            tokens = torch.arange(2 * spec.model.context, device=CUDA).view(2, -1) % 100
            flight = t.stage.run_forward(tokens, None)
            t.stage.run_backward(flight, torch.ones_like(flight.output))
            found.append([flight.output.detach(), *(p.grad for p in t.stage.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def no_memory(size: int) -> torch.Tensor:
    raise RuntimeError("CUDA error: out of memory")


CODECS = ["fp32", "bf16", "int8", "int4+ef21", "eden:3", "topk:0.1", "lowrank:2", "int8+zstd"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("leg", ["forward", "backward"])
def test_messages_are_the_same_bytes_by_either_way(codec, leg):
    spec = make_spec(wire={"forward": codec, "backward": codec})
    x = torch.randn(2, 16, 24, device=CUDA)
    payloads, arrived, not_pinned = [], [], []
    ordinary = HostMemory(not_pinned.append, no_memory)
    for transfers in (Transfers(CUDA), CudaTransfers(CUDA), CudaTransfers(CUDA, memory=ordinary)):
        sender, receiver = End(spec), End(spec)
        slot = sender.slot(MessageKey(3, 1, 0, leg), x.shape, x.dtype, None)
        payloads.append(bytes(transfers.send(sender, x, slot)()))
        arrived.append(transfers.receive(receiver, payloads[-1], slot))
        transfers.check()
    assert payloads[0] == payloads[1] == payloads[2]
    assert all(torch.equal(arrived[0], other) for other in arrived[1:])
    assert len(not_pinned) == 1


def test_token_ids_are_uploaded_where_no_memory_can_be_pinned():
    ids = np.arange(1 << 20).reshape(2, -1)
    there = CudaTransfers(CUDA, memory=HostMemory(pin=no_memory)).upload(ids)
    assert torch.equal(there.cpu(), torch.from_numpy(ids))


@pytest.mark.parametrize("leg", ["forward", "backward"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("bits", "width"), [(4, 512), (3, 96), (1, 5)])
def test_eden_restores_the_same_numbers_as_on_the_cpu(bits, width, leg, compiled):
    """Bit for bit, or memories at two ends would drift apart; levels on the edge may be rounded either way."""
    x = torch.randn(2, 64, width, generator=torch.Generator().manual_seed(0))
    here = Slot(MessageKey(3, 1, 0, leg), tuple(x.shape), x.dtype, 5)
    there = replace(here, compiled=compiled)
    sent, sent_there = Eden(bits).encode(x, here), Eden(bits).encode(x.to(CUDA), there)
    arrived = Eden(bits).decode([part.to(CUDA) for part in sent], there)
    assert torch.equal(arrived.cpu(), Eden(bits).decode(sent, here))
    assert torch.allclose(sent_there[0].cpu().float(), sent[0].float(), rtol=2.0**-7, atol=0)
    assert (sent_there[1].cpu() != sent[1]).float().mean() < 1e-3


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_does_not_travel(codec):
    end, x = End(make_spec(wire={"forward": codec})), torch.randn(2, 16, 24, device=CUDA)
    x[0, 3, 5] = torch.nan
    slot = end.slot(MessageKey(1, 0, 0, "forward"), x.shape, x.dtype, None)
    assert CudaTransfers(CUDA).send(end, x, slot)() is None


@pytest.mark.parametrize("codec", [*CODECS, "int4+aqsgd"])
def test_after_poison_the_same_samples_cross_again(codec):
    """Within the step, as they may where an epoch ends: both ends know of the same messages."""
    spec = make_spec(wire={"forward": codec})
    x, windows = torch.randn(2, 16, 24, device=CUDA), torch.arange(2)[:, None].expand(-1, 17)
    sender, receiver, transfers = End(spec), End(spec), CudaTransfers(CUDA)
    slots = [sender.slot(MessageKey(1, m, 0, "forward"), x.shape, x.dtype, windows) for m in (0, 1)]
    poison = transfers.send(sender, torch.full_like(x, torch.inf), slots[0])()
    assert poison is None
    assert transfers.receive(receiver, poison, slots[0]).isnan().all()
    arrived = transfers.receive(receiver, transfers.send(sender, x, slots[1])(), slots[1])
    transfers.check()
    assert codec != "int4+aqsgd" or torch.equal(arrived, x), "it was not new to both"


@pytest.mark.parametrize("then", ["send", "check"])
def test_a_neighbour_that_sends_what_is_not_finite_is_named(then):
    end, x = End(make_spec()), torch.zeros(1, 4, 24, device=CUDA)
    slot = end.slot(MessageKey(1, 0, 0, "forward"), x.shape, x.dtype, None)
    transfers, bad = CudaTransfers(CUDA), np.full(x.numel(), np.inf, np.float32).tobytes()
    transfers.receive(end, bad, slot)
    with pytest.raises(BadMessage) as caught:
        transfers.send(end, x, slot)() if then == "send" else transfers.check()
    assert (caught.value.kind, caught.value.leg) == ("not_finite", "forward")


def test_a_snapshot_is_of_the_step_it_was_asked_for():
    """The next step may change every tensor while it is being copied."""
    _, t = trainer(model={"width": 512, "hidden": 2048})
    transfers = CudaTransfers(CUDA)
    take_step(t, transfers, 1)
    for pinned in (False, True):
        if pinned:
            pin(t, transfers)
        right = on_host(t.state({}))
        wait = transfers.copy(t.state({}))
        take_step(t, transfers, 2)
        found = wait()
        assert all(torch.equal(found[name], right[name]) for name in right)
        assert not torch.equal(right["weights/layers.0.attn.q.weight"], t.stage.layers["0"].attn.q.weight.cpu())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bf16", 1e-2)])
def test_four_processes_follow_the_reference(dtype, tolerance):
    adamw = {"name": "adamw", "lr": 1e-3}  # Muon's bf16 iteration makes more of a last bit than float32 allows
    spec = make_spec(stages=4, steps=60, optimizer=adamw, compute={"dtype": dtype})
    right = losses_of(spec, CUDA)
    _, rows = pipeline_rows(spec, device="cuda:0")
    worst = max(abs(row["loss"] - loss) / loss for row, loss in zip(rows, right, strict=True))
    print(f"{dtype}: largest relative difference of a step's loss: {worst:.2e}", os.getpid())
    assert worst < tolerance


def test_an_empty_payload_is_the_neighbours_fault():
    end, shape = End(make_spec()), (1, 4, 24)
    slot = end.slot(MessageKey(1, 0, 0, "forward"), shape, torch.float32, None)
    with pytest.raises(BadMessage) as caught:
        CudaTransfers(CUDA).receive(end, b"", slot)
    assert caught.value.kind == "size"


def test_what_came_for_an_abandoned_step_accuses_nobody():
    end, x = End(make_spec()), torch.zeros(1, 4, 24, device=CUDA)
    slot = end.slot(MessageKey(1, 0, 0, "forward"), x.shape, x.dtype, None)
    transfers = CudaTransfers(CUDA)
    transfers.receive(end, np.full(x.numel(), np.nan, np.float32).tobytes(), slot)
    transfers.forget()
    transfers.check()
