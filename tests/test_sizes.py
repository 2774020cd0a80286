"""What a stage takes in memory and work, as it is counted, against torch."""

from typing import Any

import pytest
import torch
from conftest import make_spec
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from protomodels_cli.cost.memory import StageMemory, in_flight_limit
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.lab.memory import peak_bytes
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.grassmann import GradientCovariance
from protomodels_cli.model.optim import StageOptimizer
from protomodels_cli.model.shape import Shape, slices
from protomodels_cli.model.stage import Stage
from protomodels_cli.spec.schema import RunSpec

KINDS = [  # every form with every optimizer it can have
    ("reparam", "muon"),
    ("reparam", "adamw"),
    ("constrained", "muon"),
    ("constrained", "row_adamw"),
    ("dense", "muon"),
    ("dense", "adamw"),
]


class Bench:
    """One stage of a spec in real tensors."""

    def __init__(self, spec: RunSpec, index: int):
        self.spec, self.slice, self.after = spec, slices(spec)[index], len(slices(spec)) - 1 - index
        self.dtype = Shape.of(spec).dtype
        basis = initial_basis(spec.model.width, spec.subspace.k, 0, self.dtype)
        self.stage = Stage(spec, self.slice, None if spec.subspace.form == "dense" else basis)
        self.optimizer = StageOptimizer(self.stage, spec.optimizer, spec.seed)
        self.covariance = GradientCovariance(spec.model.width, torch.device("cpu"))
        if self.slice.is_last and spec.subspace.form != "dense":
            self.stage.on_release = self.covariance.add
        windows = spec.batch.size // spec.batch.microbatches
        self.tokens = torch.randint(spec.vocab_size, (windows, spec.model.context))

    def forward(self) -> Any:
        shape = (*self.tokens.shape, self.spec.boundary_width)
        return self.stage.run_forward(
            self.tokens, None if self.slice.is_first else torch.randn(shape, dtype=self.dtype)
        )

    def backward(self, flight: Any) -> None:
        if self.slice.is_last:
            self.stage.run_loss(flight, self.tokens, 1e-3)
        else:
            self.stage.run_backward(flight, torch.randn_like(flight.output))

    def accumulate(self) -> None:
        flights = [self.forward() for _ in range(in_flight_limit(self.spec, self.after))]
        while flights:
            self.backward(flights.pop(0))

    def step(self) -> None:
        self.optimizer.prepare()
        self.optimizer.apply(1e-3, 1.0)


def benched(form: str, optimizer: str, vocab: int = 400, in_flight: int | None = None, **model: Any) -> RunSpec:
    shape = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 160, "context": 32, "qk_norm": True}
    return make_spec(
        stages=3,
        model={**shape, **model},
        subspace={"form": form},
        optimizer={"name": optimizer},
        batch={"size": 24, "microbatches": 12, "in_flight": in_flight},
        tokenizer={"kind": "bpe", "vocab_size": vocab},
        compute={"loss_chunk": 20},
    )


@pytest.mark.parametrize("kept", [{}, {"moments": "bf16", "tables": "row_adamw"}])
@pytest.mark.parametrize(("form", "optimizer"), KINDS)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_is_resident_is_counted_to_the_byte(form, optimizer, kept, index):
    spec = benched(form, optimizer)
    bench = Bench(spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update=kept)}), index)
    bench.accumulate()
    bench.step()
    bench.accumulate()
    tensors = [t for p in bench.stage.parameters() for t in (p, p.grad)]
    tensors += [t for p in bench.optimizer.parameters for t in p.state.values()]
    if form != "dense":
        tensors += [bench.stage.basis.u, bench.stage.t_fixed.signs]
    resident = StageMemory(bench.spec).resident(bench.slice.first_layer, bench.slice.end_layer)
    assert resident == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("form", ["reparam", "constrained", "dense"])
@pytest.mark.parametrize("model", [{}, {"qk_norm": False}, {"kv_heads": 4, "head_dim": 8}, {"hidden": 16}])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_autograd_saves_is_what_is_counted_as_in_flight(form, model, index):
    bench = Bench(benched(form, "muon", **{"layers": 9, **model}), index)
    own = {p.untyped_storage().data_ptr() for p in bench.stage.parameters()}
    if form != "dense":
        own.add(bench.stage.basis.u.untyped_storage().data_ptr())
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        flights = [bench.forward() for _ in range(in_flight_limit(bench.spec, bench.after))]
    measured = sum(storage.nbytes() for storage in saved.values())
    said = StageMemory(bench.spec).in_flight(bench.slice.first_layer, bench.slice.end_layer, bench.after)
    assert flights
    assert measured <= said <= 1.2 * measured


@pytest.mark.parametrize(("form", "optimizer"), KINDS)
@pytest.mark.parametrize(("index", "vocab"), [(0, 3000), (1, 300), (2, 3000)])  # the ends' tables are the larger part
def test_a_stage_never_takes_more_than_its_memory_and_not_much_less(form, optimizer, index, vocab):
    spec = benched(form, optimizer, vocab, in_flight=2)

    def work():
        bench = Bench(spec, index)
        for _ in range(2):
            bench.accumulate()
            bench.step()

    part = slices(spec)[index]
    said = StageMemory(spec).total(part.first_layer, part.end_layer, 2 - index)
    measured = peak_bytes(work)
    assert measured <= said <= 1.6 * measured


def test_in_flight_is_twice_the_stages_to_the_last_unless_told_and_never_more_than_a_step_has():
    assert [in_flight_limit(make_spec(), after) for after in (0, 1, 5)] == [1, 4, 12]
    assert in_flight_limit(make_spec(batch={"in_flight": 3}), 5) == 3
    one, more = (
        StageMemory(make_spec(batch={"size": n, "microbatches": n, "in_flight": f})) for n, f in ((8, 1), (8, 99))
    )
    assert more.in_flight(0, 1, 3) == 8 * one.in_flight(0, 1, 3)


@pytest.mark.parametrize("form", ["reparam", "constrained", "dense"])
def test_flops_are_those_that_torch_counts(form):
    spec = make_spec(stages=1, subspace={"form": form}, model={"head_dim": 10, "qk_norm": True})
    bench, units, tokens = Bench(spec, 0), unit_flops(spec), 2 * 16
    bench.stage.on_release = None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        bench.backward(bench.forward())
    # The plain attention counted here computes the whole square of scores; we count the half that is used.
    whole, half = 12 * 4 * 10 * 16, 6 * 4 * 10 * 17
    found = counter.get_total_flops() / tokens - 4 * (whole - half)
    if form == "reparam":
        found -= 4 * 6 * 32  # where the stream leaves S: left out, being the stage's and not a layer's
    assert found == sum(units.values())
    assert units["embed"] == 0
    assert units["head"] == 6 * 32 * 256
    assert all(n.is_integer() for n in units.values())
