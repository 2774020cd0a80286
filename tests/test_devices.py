"""One stage over several devices: the bits of one device, and no operator that mixes two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import corpus_of, make_spec
from pool import Pool
from tiers import first
from torch.utils._python_dispatch import TorchDispatchMode

from protomodels_cli.codecs import Carrier
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.shape import slices
from protomodels_cli.model.state import on_host
from protomodels_cli.model.trainer import StageTrainer

CPU, META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten


def halves(layers: range, first: torch.device, second: torch.device) -> list[tuple[torch.device, range]]:
    middle = (layers.start + layers.stop) // 2
    return [(first, range(layers.start, middle)), (second, range(middle, layers.stop))]


def trainers_of(reference: Reference, first: torch.device, second: torch.device) -> list[StageTrainer]:
    spec, recompute = reference.spec, reference.stages[0].recompute
    return [StageTrainer(spec, s, reference.basis, halves(s.layers, first, second), recompute) for s in slices(spec)]


def over(reference: Reference, first: torch.device = CPU, second: torch.device = CPU) -> Reference:
    """The same reference, with every stage in two halves."""
    reference.trainers = trainers_of(reference, first, second)
    reference.stages = [trainer.stage for trainer in reference.trainers]
    return reference


def reference_of(device: torch.device = CPU, **sections: Any) -> Reference:
    spec = make_spec(stages=2, **sections)
    return Reference(spec, corpus_of(spec), Carrier(spec), device)


MOVES = {"update": {"interval": 4, "window": 3, "move": "project"}}
CASES = [
    ("reparam", "adamw", MOVES, {}),
    ("reparam", "muon", {"unconstrained_layers": 2}, {"recompute": "block"}),
    ("constrained", "row_adamw", MOVES, {"recompute": "stage"}),
    ("constrained", "muon", MOVES, {"dtype": "bf16"}),
    ("dense", "adamw", {}, {"recompute": "stage"}),
    ("two_stream", "adamw", {}, {}),  # its last segment is released on the first device, and goes on on the second
    ("two_stream", "muon", {"anchor": "segment"}, {"recompute": "block"}),
    ("reparam", "muon", {"anchor": "segment", "anchor_rank": 5}, {"recompute": "stage"}),
    ("dense", "adamw", {"anchor": "segment"}, {"dtype": "bf16"}),
]


@pytest.mark.parametrize(("form", "optimizer", "subspace", "compute"), first(3, CASES))
def test_two_halves_end_with_the_bits_of_one_device_also_after_a_restore(form, optimizer, subspace, compute):
    sections = {
        "steps": 10,
        "subspace": {"form": form, "sync_interval": 4, **subspace},
        "optimizer": {"name": optimizer, "moments": "bf16" if optimizer == "adamw" else "float32"},
        "compute": compute,
    }
    right, found = reference_of(**sections), over(reference_of(**sections))
    assert [len(stage.sections) for stage in found.stages] == [2, 2]
    rows = list(right.train())
    first = [row["loss"] for row in found.train(6) if row["event"] == "step"]
    assert first == [row["loss"] for row in rows if row["event"] == "step"][:6]
    saved = [on_host(t.state(found.carry.state(i))) for i, t in enumerate(found.trainers)]
    for trainer, state in zip(over(found).trainers, saved, strict=True):
        trainer.load(state)
    list(found.train())
    assert found.weights_sha256() == right.weights_sha256()
    assert {"switch" for row in rows if row["event"] == "switch"} == ({"switch"} if subspace is MOVES else set())


def test_a_peer_with_several_devices_is_one_peer_among_others(pool: Pool):
    """Whoever holds which stage: the weights are the reference's."""
    spec = make_spec(stages=2, subspace={"sync_interval": 4, **MOVES}, wire={"forward": "int8+ef21"}, steps=8)
    led, peers = pool.run(spec, [{"devices": ["cpu", "cpu"]}, {"devices": ["cpu", "cpu", "cpu"]}])
    assert [peer["exit"] for peer in peers] == 2 * [led["exit"]] == [0, 0], [led, peers]
    right = Reference(spec, corpus_of(spec), Carrier(spec))
    list(right.train())
    assert led["summary"]["weights_sha256"] == right.weights_sha256()


def test_a_flipped_bit_shows_on_whichever_device_it_is():
    stage = over(reference_of()).stages[1]
    right = stage.sync()
    first, second = stage.sections
    assert first.form.basis.u.data_ptr() != second.form.basis.u.data_ptr()
    second.form.basis.u.view(torch.int32)[3, 2] ^= 1
    assert stage.sync().basis_sha256 != right.basis_sha256
    second.form.basis.u.view(torch.int32)[3, 2] ^= 1
    assert stage.sync() == right
    second.t_fixed.signs[77, 1] ^= 1
    assert stage.sync().t_fixed_sha256 != right.t_fixed_sha256


class TwoDevices(TorchDispatchMode):
    """`meta` as a second device, from which zeros come back. Raises where an operator is given tensors of both."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed = 0  # tensors of more than one number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        if func is aten._local_scalar_dense.default and tensors[0].is_meta:
            return 0.0
        if func is aten._to_copy.default and kwargs.get("device", tensors[0].device) != tensors[0].device:
            self.crossed += tensors[0].numel() > 1
            to_cpu = {"dtype": kwargs.get("dtype") or tensors[0].dtype, "device": CPU}
            return torch.zeros(tensors[0].shape, **to_cpu) if tensors[0].is_meta else func(*args, **kwargs)
        if func is aten.copy_.default:
            return args[0]
        devices = {t.device for t in tensors if t.dim()}
        if len(devices) > 1:
            raise RuntimeError(f"{func} was given tensors on {devices}")
        return func(*args, **kwargs)


@pytest.mark.parametrize(("form", "optimizer"), [("reparam", "adamw"), ("constrained", "muon"), ("dense", "adamw")])
@pytest.mark.parametrize("order", [(CPU, META), (META, CPU)])
@pytest.mark.parametrize("index", [0, 1])
def test_no_operator_is_given_tensors_of_two_devices(form, optimizer, order, index):
    """A whole step, a move of U and a snapshot."""
    subspace = {} if form == "dense" else {"unconstrained_layers": 1, **MOVES}
    spec = make_spec(stages=2, subspace={"form": form, **subspace}, optimizer={"name": optimizer, "moments": "bf16"})
    found = Reference(spec, corpus_of(spec), Carrier(spec))
    with TwoDevices() as seen:
        t = StageTrainer(spec, slices(spec)[index], found.basis, halves(slices(spec)[index].layers, *order), draw=False)
        stage = t.stage
        t.begin(4)  # which is of those whose gradients are gathered
        tokens = torch.zeros((2, spec.model.context), dtype=torch.int64, device=order[0])
        message = torch.zeros((2, spec.model.context, spec.boundary_width), device=order[0])
        seen.crossed = 0
        flight = stage.run_forward(tokens, message if index else None)
        if index:
            loss, back = stage.run_loss(flight, tokens, 1.0)
            assert loss.device == back.device == order[0]
        else:
            assert flight.output.device == order[0]
            stage.run_backward(flight, message)
        # The state, its gradient, and targets or the message; ids for T_fixed; the gradient of a message.
        assert seen.crossed == 3 + (form != "dense") + (1 - index)
        t.prepare()
        t.decide(4, apply=True, lr=0.1, clip=0.5)
        if found.basis is not None:
            t.switch_basis(found.basis)
        on_host(t.state({}))
        stage.evaluate(tokens, message if index else None)
    lies = {name: p.device for name, p in stage.named_parameters()}
    ends = ["embed.weight"] if index == 0 else ["head.out.weight"]
    assert [lies[name] for name in ends] == [order[index]]
    for (device, layers), section in zip(halves(stage.slice.layers, *order), stage.sections, strict=True):
        assert {d for name, d in lies.items() if name.split(".")[1] in map(str, layers)} == {device}
        assert section.form.basis is None or section.form.u.device == device
    for trained in t.optimizer.parameters:
        assert {kept.device for kept in trained.state.values()} == {trained.parameter.device}


@pytest.mark.parametrize("order", [(CPU, META), (META, CPU)])
@pytest.mark.parametrize("index", [0, 1])
def test_nor_where_a_segment_ends_between_them(order, index):
    spec = make_spec(stages=2, model={"segments": 4}, subspace={"form": "two_stream"})
    found = Reference(spec, corpus_of(spec), Carrier(spec))
    slice_ = slices(spec)[index]
    with TwoDevices():
        t = StageTrainer(spec, slice_, found.basis, halves(slice_.layers, *order), draw=False)
        t.begin(1)
        assert t.stage.early_weight
        tokens = torch.zeros((2, spec.model.context), dtype=torch.int64, device=order[0])
        message = torch.zeros((2, spec.model.context, spec.boundary_width), device=order[0])
        flight = t.stage.run_forward(tokens, message if index else None)
        t.stage.run_loss(flight, tokens, 1.0) if index else t.stage.run_backward(flight, message)
        t.prepare()
