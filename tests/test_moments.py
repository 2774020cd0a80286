"""Moments in bfloat16, row AdamW for the large tables, and a step that never waits for its device."""

import pytest
import torch
from conftest import corpus_of, make_reference, make_spec
from safetensors.torch import load_file, save_file
from tiers import first
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protomodels_cli.codecs import Carrier
from protomodels_cli.lab.memory import peak_bytes
from protomodels_cli.model import optim, rules
from protomodels_cli.model.moments import new_state, round_stochastically
from protomodels_cli.model.reference import Reference
from protomodels_cli.protocol.steps import learning_rate
from protomodels_cli.spec.optimizer import OptimizerSpec

NARROW = {"moments": "bf16", "tables": "row_adamw"}


def rounded(wide, seed=0, start=0):
    kept = torch.empty(wide.shape, dtype=torch.bfloat16)
    round_stochastically(wide, kept, seed, start)
    return kept


def test_rounding_goes_to_either_neighbour_and_is_right_in_the_mean():
    for x in (1 + 2**-7 * 0.3, -3.14159, 1.7e-12, 2.9e30):
        found = rounded(torch.full((200_000,), x)).double()
        step = 2**-7 * 2.0 ** torch.tensor(abs(x)).log2().floor().item()
        assert len(found.unique()) == 2
        assert (found - x).abs().max() < step
        assert abs(found.mean() - x) < 0.01 * step


def test_rounding_changes_nothing_that_bfloat16_holds():
    x = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-126, 3e38, torch.inf, -torch.inf]).bfloat16()
    assert torch.equal(rounded(x.float()).view(torch.int16), x.view(torch.int16))
    payloads = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x1], dtype=torch.int32).view(torch.float32)
    assert rounded(payloads).isnan().all()


def test_a_part_of_a_tensor_is_rounded_as_it_is_in_the_whole():
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(x[13:30], start=13 * 7), rounded(x)[13:30])
    assert not torch.equal(rounded(x, seed=1), rounded(x))


def test_second_moments_reach_a_constant_gradients_square():
    """Within a percent; rounded to the nearest they stop where a step is less than half of what tells two apart."""
    o = OptimizerSpec(name="adamw", beta2=0.999)
    g = torch.full((4096,), 0.37)
    kept, nearest = (torch.zeros(4096, dtype=torch.bfloat16) for _ in range(2))
    for t in range(1, 6001):
        for moment in (kept, nearest):
            wide = moment.float().lerp_(g.square(), 1 - o.beta2)
            if moment is kept:
                round_stochastically(wide, kept, t, 0)
            else:
                nearest.copy_(wide)
    right = 0.37**2 * (1 - 0.999**6000)
    assert kept.double().mean() == pytest.approx(right, rel=0.01)
    assert nearest.double().mean() < 0.5 * right


def test_steps_are_those_of_float32_moments_in_the_mean():
    """300 steps of noisy gradients: the error of the sum of all directions is small, and has no sign."""
    o = OptimizerSpec(name="adamw", beta2=0.999)
    generator = torch.Generator().manual_seed(3)
    exact, narrow = (new_state("adamw", torch.zeros(64, 64), d) for d in (torch.float32, torch.bfloat16))
    total = torch.zeros(2, 64, 64, dtype=torch.float64)
    for t in range(1, 301):
        g = 0.5 + torch.randn(64, 64, generator=generator)
        wide = {key: kept.float() for key, kept in narrow.items()}
        total[0] += rules.adamw(g, exact, t, o)
        total[1] += rules.adamw(g, wide, t, o)
        for i, (key, kept) in enumerate(narrow.items()):
            round_stochastically(wide[key], kept, 2 * t + i, 0)
    error = (total[1] - total[0]) / total[0].abs().mean()
    assert error.abs().mean() < 0.02
    assert error.mean().abs() < 0.002


def losses(**sections):
    return [row["loss"] for row in make_reference(**sections).train() if row["event"] == "step"]


@pytest.mark.parametrize(("form", "name", "tables"), [("reparam", "muon", "adamw"), ("dense", "adamw", "row_adamw")])
@pytest.mark.full
def test_training_goes_as_with_float32_moments(form, name, tables):
    def run(moments):
        return losses(
            steps=60,
            stages=1,
            subspace={"form": form},
            optimizer={"name": name, "tables": tables, "moments": moments},
            batch={"microbatches": 1},
            eval={"interval": 0},
        )

    wide, narrow = run("float32"), run("bf16")
    assert narrow != wide
    assert narrow[-1] == pytest.approx(wide[-1], rel=0.01)
    assert wide[-1] < wide[0] - 1


def test_row_adamw_of_a_dense_models_tables_from_its_definition(reference):
    r = reference(
        stages=2,
        subspace={"form": "dense"},
        optimizer={"name": "adamw", "tables": "row_adamw", "clip": 0.0, "weight_decay": 0.1},
    )
    tables = {
        p.name: p.parameter for trainer in r.trainers for p in trainer.optimizer.parameters if p.unit in "embed head"
    }
    right = {name: p.detach().double() for name, p in tables.items() if p.ndim == 2}
    m, v = ({name: torch.zeros_like(p) for name, p in right.items()} for _ in range(2))
    for t in (1, 2, 3):
        r.accumulate(t)
        lr = learning_rate(r.spec.optimizer, t, r.spec.steps)
        for name in right:
            g = tables[name].grad.double()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g.square().mean(1, keepdim=True)
            direction = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            right[name] = (1 - lr * 0.1) * right[name] - lr * direction
        r.prepare()
        for trainer in r.trainers:
            trainer.decide(t, True, lr, 1.0)
    assert len(right) == 2
    for name, weight in right.items():
        assert torch.allclose(tables[name].double(), weight, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(
    ("form", "name"), first(1, [("reparam", "muon"), ("constrained", "row_adamw"), ("reparam", "adamw")])
)
def test_any_cut_and_any_restore_end_with_the_same_bytes(tmp_path, form, name):
    """Also where U moves, and the moments with it."""
    subspace = {"form": form, "update": {"interval": 3, "window": 2, "delay": 1, "move": "project"}}
    sections = {"steps": 8, "subspace": subspace, "optimizer": {"name": name, **NARROW}}

    def run(stages, stop=8):
        r = make_reference(stages=stages, **sections)
        for _ in r.train(until=stop):
            pass
        return r

    whole, cut, early = run(1), run(4), run(2, stop=5)
    again = make_reference(stages=2, **sections)
    again.step, again.basis, again.next_basis = early.step, early.basis, early.next_basis
    for i, (trainer, restored) in enumerate(zip(early.trainers, again.trainers, strict=True)):
        save_file(trainer.state(early.carry.state(i)), tmp_path / "part.safetensors")
        saved = load_file(tmp_path / "part.safetensors")
        firsts = {p.parameter.ndim: saved[f"optimizer/{p.name}/first"].dtype for p in trainer.optimizer.parameters}
        assert firsts == {1: torch.float32, 2: torch.bfloat16}
        restored.stage.form.basis = early.basis
        restored.load(saved)
    for _ in again.train():
        pass
    if form == "reparam":  # elsewhere the wire's rounding depends on the cut
        assert cut.weights_sha256() == whole.weights_sha256()
    assert again.weights_sha256() == run(2).weights_sha256()
    assert again.basis.version > 1


@pytest.mark.parametrize(("form", "name"), [("constrained", "row_adamw"), ("dense", "adamw")])
def test_large_tables_are_stepped_in_pieces_that_change_nothing(monkeypatch, form, name):
    sections = {"stages": 1, "steps": 2, "subspace": {"form": form}, "optimizer": {"name": name, **NARROW}}

    def run():
        """The weights, and the most that a step took beside weights, gradients and moments."""
        r = make_reference(**sections)
        optimizer = r.trainers[0].optimizer
        r.run_step()
        r.accumulate(2)
        r.prepare()
        there = [t for p in optimizer.parameters for t in (p.parameter, p.gradient, *p.state.values())]

        def work():
            seen = [t.detach() for t in there]  # so that they count from the first moment to the last
            optimizer.apply(1e-3, 0.5)
            assert seen

        taken = peak_bytes(work) - sum(t.nbytes for t in there)
        return r.weights_sha256(), taken

    table, piece = 4 * 256 * 32, 512
    in_one, taken_in_one = run()
    monkeypatch.setattr(optim, "STEP_NUMBERS", piece)
    in_pieces, taken = run()
    assert in_pieces == in_one
    assert taken <= 6 * 4 * piece < table < taken_in_one


class Waits(TorchFunctionMode):
    """What would wait for a device: numbers that are read from it, and copies of numbers to it."""

    READS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, torch.tensor, torch.as_tensor, torch.equal)
    READS += (Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.nonzero)

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_waits_are_seen():
    with Waits() as waits:
        x = torch.tensor(1.0)
        float(x), int(x), bool(x), x.item(), x.tolist(), x.numpy(), [0, 1][x.long()]
    assert waits.seen == ["tensor", "__float__", "__int__", "__bool__", "item", "tolist", "numpy", "__index__"]


@pytest.mark.parametrize("choice", [{}, NARROW])
@pytest.mark.parametrize(
    ("form", "name"), [("constrained", "row_adamw"), ("constrained", "muon"), ("reparam", "adamw"), ("dense", "muon")]
)
def test_a_step_waits_for_its_device_once_when_norms_are_read(form, name, choice):
    spec = make_spec(stages=1, subspace={"form": form}, optimizer={"name": name, **choice})
    r = Reference(spec, corpus_of(spec), Carrier(spec))
    for step in (1, 2):
        r.accumulate(step)
        with Waits() as preparing:
            r.trainers[0].optimizer.prepare()
        with Waits() as applying:
            r.trainers[0].optimizer.apply(1e-3, 0.5)
        assert (preparing.seen, applying.seen) == (["tolist"], [])
