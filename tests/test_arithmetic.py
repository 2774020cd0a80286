"""How a stage computes: bfloat16 products, what is computed again in the backward pass, compiled operators."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import make_spec
from tiers import table

from protomodels_cli.codecs import Carrier
from protomodels_cli.data.prepare import prepare
from protomodels_cli.model import operators
from protomodels_cli.model.arithmetic import choose
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.llama import Head, Multiplied, Running
from protomodels_cli.model.loss import loss_and_gradient
from protomodels_cli.model.products import add_product
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.shape import Shape, slices
from protomodels_cli.model.stage import Stage
from protomodels_cli.worker.device import computation_of, try_compiling

FORMS = ("two_stream", "reparam", "constrained", "dense")
CPU = torch.device("cpu")
PROBLEM = "no compiler here"


def trained(steps=6, **sections):
    spec = make_spec(steps=steps, **sections)
    r = Reference(spec, prepare(spec), Carrier(spec))
    losses = [row["loss"] for row in r.train() if row["event"] == "step"]
    return r, losses


@pytest.mark.parametrize(("dtype", "form"), table([*itertools.product(["float32", "float64", "bf16"], FORMS)]))
def test_what_is_computed_again_changes_no_bit(form, dtype):
    hashes = set()
    for recompute in ("none", "block", "stage"):
        r, _ = trained(stages=2, subspace={"form": form}, compute={"dtype": dtype, "recompute": recompute})
        hashes.add(r.weights_sha256())
    assert len(hashes) == 1


@pytest.mark.full
@pytest.mark.parametrize("form", sorted(FORMS, reverse=True))
def test_bf16_follows_float32(form):
    losses = [trained(30, subspace={"form": form}, compute={"dtype": dtype})[1] for dtype in ("float32", "bf16")]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_bf16_keeps_its_weights_and_gradients_in_float32():
    r, _ = trained(2, compute={"dtype": "bf16"})
    for stage, trainer in zip(r.stages, r.trainers, strict=True):
        assert {p.dtype for p in stage.parameters()} == {torch.float32}
        assert {t.dtype for p in trainer.optimizer.parameters for t in p.state.values()} == {torch.float32}
        multiplied = [m for m in stage.modules() if isinstance(m, Multiplied) and m.working is not m.weight]
        assert multiplied
        for module in multiplied:
            assert torch.equal(module.working, module.weight.to(torch.bfloat16)), "a copy lags behind its weight"


def test_a_gradient_is_summed_in_the_weights_precision():
    """256 ones and then halves: a sum in bfloat16 would stop growing."""
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    for _ in range(600):
        add_product(weight, torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16))
    assert weight.grad.item() == 600


def test_what_auto_means():
    spec = make_spec()
    assert spec.compute.dtype == "auto"
    found = choose(spec.compute, CPU)
    assert (found.name, found.stored, found.compiled) == ("float32", torch.float32, False)
    found = choose(make_spec(compute={"dtype": "bf16", "compile": "always"}).compute, CPU)
    assert (found.matmul, found.stored, found.compiled) == (torch.bfloat16, torch.float32, True)


def test_the_losses_gradient_is_autograds():
    logits, targets = torch.randn(7, 50, dtype=torch.float64, requires_grad=True), torch.randint(50, (7,))
    right = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    (right.sum() * 0.3).backward()
    losses, gradient = operators.losses_and_gradient(logits.detach(), targets, torch.tensor(0.3), torch.float64)
    assert torch.allclose(losses, right, atol=1e-12)
    assert torch.allclose(gradient, logits.grad, atol=1e-12)


def test_the_weight_of_a_loss_is_not_compiled_in():
    """That of early losses is another in every step."""
    compiled = torch.compile(operators.losses_and_gradient, backend="eager", fullgraph=True, dynamic=False)
    spec = make_spec(subspace={"form": "two_stream"})
    head, x, targets = Head(Shape.of(spec), 32), torch.randn(1, 8, 32), torch.arange(8).view(1, 8)
    torch.nn.init.normal_(head.out.weight)
    run = Running(replace(operators.EAGER, losses_and_gradient=compiled), torch.float32, x, x)
    for step in range(2 * torch._dynamo.config.recompile_limit):
        loss_and_gradient(head, run, x, targets, 8, 0.1 * step)


def test_a_stage_that_cannot_compile_says_why_and_goes_on(monkeypatch):
    def broken(*_):
        raise RuntimeError(f"{PROBLEM}\nmore")

    spec = make_spec(compute={"compile": "always"})
    broken_operators = operators.Operators(*[broken] * 5)
    monkeypatch.setattr("protomodels_cli.model.stage.compiled", lambda: broken_operators)
    stage = Stage(spec, slices(spec)[0], initial_basis(32, 6, 0))
    assert stage.warm_up(1, spec.model.context) == PROBLEM
    assert stage.running is stage.eager
    assert trained(2, compute={"compile": "always"})[1] == trained(2)[1], "the reference goes on as well"


def test_a_machine_that_cannot_compile_is_known_before_a_stage_is_built(monkeypatch):
    tries = []

    def broken(*_, **__):
        tries.append(1)
        raise RuntimeError(f"{PROBLEM}\nmore")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr("protomodels_cli.model.compiling._problems", {})
    eager, asked = make_spec(), make_spec(compute={"compile": "always"})
    assert try_compiling(eager, CPU) is None
    assert not tries, "nothing is compiled on a CPU unless asked for"
    assert computation_of(asked, CPU).compiled
    assert try_compiling(asked, CPU) == PROBLEM
    assert not computation_of(asked, CPU).compiled
    assert computation_of(asked, CPU) == computation_of(eager, CPU), "so that memory is counted as for plain operators"
    stage = Stage(asked, slices(asked)[0], initial_basis(32, 6, 0))
    assert stage.running is stage.eager
    assert stage.warm_up(1, asked.model.context) is None
    try_compiling(asked, CPU)
    assert tries == [1], "once for a process"
