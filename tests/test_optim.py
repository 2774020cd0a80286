"""The optimizers against torch's, against their definitions, and against each other across the two forms."""

import math

import pytest
import torch
from conftest import make_reference
from hypothesis import given
from hypothesis import strategies as st
from tiers import first

from protomodels_cli.forms.constrained import Constrained
from protomodels_cli.forms.dense import Dense
from protomodels_cli.lab.optimizer import constrained, drift, leaver
from protomodels_cli.model import rules
from protomodels_cli.model.moments import new_state
from protomodels_cli.model.state import weights
from protomodels_cli.protocol.steps import Outcome, clip_coefficient, gradient_norm, learning_rate
from protomodels_cli.spec.optimizer import OptimizerSpec, ScheduleSpec

TABLE = [
    # optimizer, role, form → rule
    ("adamw", "writer", Dense, "adamw"),
    ("adamw", "gain", Dense, "adamw"),
    ("row_adamw", "writer", Constrained, "row_adamw"),
    ("row_adamw", "embedding", Constrained, "row_adamw"),
    ("row_adamw", "matrix", Dense, "adamw"),
    ("muon", "matrix", Dense, "muon"),
    ("muon", "writer", Dense, "muon"),
    ("muon", "writer", Constrained, "muon"),
    ("muon", "embedding", Dense, "adamw"),
    ("muon", "embedding", Constrained, "row_adamw"),
    ("muon", "head", Dense, "adamw"),
    ("muon", "gain", Dense, "adamw"),
]


@pytest.mark.parametrize(("optimizer", "role", "form", "rule"), TABLE)
def test_what_moves_what(optimizer, role, form, rule):
    assert form.rule_for(optimizer, role) == rule


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_large_tables_may_have_row_adamw(name):
    o = OptimizerSpec(name=name, tables="row_adamw")
    rules = {role: Dense.chosen_rule(o, role) for role in ("embedding", "head", "matrix", "writer", "gain")}
    assert rules == {"embedding": "row_adamw", "head": "row_adamw", "matrix": name, "writer": name, "gain": "adamw"}


def ten_gradients(rows=24, columns=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(10)]


def test_adamw_is_torchs():
    o = OptimizerSpec(name="adamw", lr=0.01, weight_decay=0.1)
    theirs = torch.nn.Parameter(torch.ones(24, 16, dtype=torch.float64))
    torch_adamw = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours, state = theirs.detach().clone(), new_state("adamw", theirs.detach(), torch.float64)
    for t, g in enumerate(ten_gradients(), 1):
        theirs.grad = g.clone()
        torch_adamw.step()
        direction = rules.adamw(g, state, t, o)
        ours.mul_(1 - 0.01 * 0.1).add_(direction, alpha=-0.01)
    assert torch.allclose(ours, theirs.detach(), rtol=1e-13)


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_fused_adamw_is_torchs_in_float32(coefficient):
    """On clipped gradients, which the kernel scales itself."""
    o = OptimizerSpec(name="adamw", lr=0.01, weight_decay=0.1)
    theirs = torch.nn.Parameter(torch.ones(24, 16))
    torch_adamw = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=False)
    ours = torch.nn.Parameter(theirs.detach().clone(), requires_grad=False)
    state = new_state("adamw", ours, torch.float32)
    for t, g in enumerate(ten_gradients(), 1):
        theirs.grad = g.float() * coefficient
        torch_adamw.step()
        rules.fused_adamw([(ours, g.float(), state)], t, o, 0.01, coefficient)
    assert torch.allclose(ours, theirs.detach(), rtol=1e-5)
    assert not torch.allclose(ours, torch.ones(24, 16), rtol=1e-2)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
def test_muon_is_torchs_up_to_its_bf16(shape):
    o = OptimizerSpec(name="muon", lr=0.01, weight_decay=0.1)
    theirs = torch.nn.Parameter(torch.zeros(shape))
    torch_muon = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    ours, state = theirs.detach().clone(), new_state("muon", theirs.detach(), torch.float32)
    for g in ten_gradients(*shape):
        theirs.grad = g.float()
        torch_muon.step()
        ours.mul_(1 - 0.01 * 0.1).add_(rules.muon(g.float(), state, o), alpha=-0.01)
    assert torch.linalg.norm(ours - theirs.detach()) / torch.linalg.norm(ours) < 2e-2


def test_orthogonalise_against_the_svd():
    """Singular vectors stay, singular values all come near 1."""
    g = ten_gradients()[0]
    found = rules.orthogonalise(g)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    inside = u.T @ found @ vt.T
    assert torch.linalg.norm(inside - inside.diagonal().diag()) < 1e-9
    assert inside.diagonal().min() > 0.6
    assert inside.diagonal().max() < 1.3
    assert torch.allclose(rules.orthogonalise(g.T), found.T)


def test_row_adamw_from_its_definition():
    """On the full d-wide projected gradient, with v the mean over d: what the coordinates compute."""
    o = OptimizerSpec(name="row_adamw", lr=0.01)
    u, _ = torch.linalg.qr(torch.randn(32, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    m, v = torch.zeros(24, 32, dtype=torch.float64), torch.zeros(24, 1, dtype=torch.float64)
    state = new_state("row_adamw", m[:, :6], torch.float64)
    for t, g in enumerate(ten_gradients(24, 32), 1):
        projected = g @ u @ u.T
        m = 0.9 * m + 0.1 * projected
        v = 0.95 * v + 0.05 * projected.square().mean(dim=1, keepdim=True)
        right = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        found = rules.row_adamw(g @ u, state, t, o, width=32) @ u.T
        assert torch.allclose(found, right, rtol=1e-12)


def test_muon_takes_both_forms_along_the_same_path(reference):
    """Orthogonalised coordinates times Uᵀ is the same step in either form; only their embeddings' rules differ,
    so those are held still."""
    runs = {}
    for form in ("constrained", "reparam"):
        r = reference(
            subspace={"form": form}, optimizer={"name": "muon"}, compute={"dtype": "float64"}, steps=20, stages=2
        )
        r.trainers[0].optimizer.parameters = [s for s in r.trainers[0].optimizer.parameters if s.name != "embed.weight"]
        runs[form] = [row["loss"] for row in r.train() if row["event"] == "step"]
    assert runs["constrained"] == pytest.approx(runs["reparam"], rel=1e-9)
    assert runs["reparam"][-1] < runs["reparam"][0] - 0.3


@pytest.mark.parametrize(("name", "dtype"), first(1, [("muon", "float32"), ("row_adamw", "float64")]))
def test_100_steps_without_reprojection_stay_in_s(reference, name, dtype):
    r = reference(
        steps=100,  # in which the others below have left it
        stages=1,
        subspace={"form": "constrained", "reproject_interval": 0},
        optimizer={"name": name, "weight_decay": 0.1},
        compute={"dtype": dtype},
        batch={"size": 2, "microbatches": 1},
        eval={"interval": 0},
    )
    for _ in r.train():
        pass
    assert drift(r) <= (1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "sign"])
def test_the_others_leave_s_within_100(reference, name):
    r = reference(steps=100, stages=1, subspace={"form": "constrained"}, batch={"size": 2, "microbatches": 1})
    step = leaver(r, name)
    for _ in range(100):
        step()
    assert drift(r) > 1e-2


def test_reprojection_puts_weights_back(reference):
    r = reference(subspace={"form": "constrained", "reproject_interval": 3}, steps=3)
    with torch.no_grad():
        for trained in constrained(r):
            trained.parameter.add_(0.01 * torch.randn_like(trained.parameter))
    assert drift(r) > 1e-2
    r.run_step()
    r.run_step()
    assert drift(r) > 1e-3, "not before its step"
    r.run_step()
    assert drift(r) < 1e-6


@pytest.mark.parametrize("form", ["constrained", "reparam", "dense"])
def test_squared_norms_do_not_depend_on_the_cut(reference, form):
    found = []
    for stages in (1, 2, 4):
        r = reference(subspace={"form": form}, compute={"dtype": "float64"}, stages=stages)
        r.accumulate(1)
        found.append(r.prepare())
        assert list(found[-1]) == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    for other in found[1:]:
        assert list(other.values()) == pytest.approx(list(found[0].values()), rel=1e-12)


def test_clipping_scales_the_whole_gradient(reference):
    wide, narrow = (reference(optimizer={"clip": clip, "weight_decay": 0.0}) for clip in (0.0, 1e-3))
    [row] = narrow.run_step()
    wide.accumulate(1)
    norms = wide.prepare()
    assert row["grad_norm"] == gradient_norm(norms.values()) > 1e-3
    coefficient = clip_coefficient(row["grad_norm"], 1e-3)
    lr = learning_rate(wide.spec.optimizer, 1, wide.spec.steps)
    wide._decide(1, Outcome(True, lr, coefficient, loss=0.0, norm=0.0, tokens=0))
    assert wide.weights_sha256() == narrow.weights_sha256()
    assert coefficient * row["grad_norm"] == pytest.approx(1e-3)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 10))
def test_clip_coefficient(squares, clip):
    norm = gradient_norm(squares)
    assert norm == pytest.approx(math.sqrt(math.fsum(squares)))
    scaled = norm * clip_coefficient(norm, clip)
    assert scaled == norm if clip == 0 else scaled <= max(clip, 0) * (1 + 1e-12) or scaled == norm <= clip


@pytest.mark.parametrize(
    ("decay", "step", "share"),
    [
        ("constant", 1, 0.1), ("constant", 10, 1.0), ("constant", 100, 1.0),
        ("linear", 5, 0.5), ("linear", 10, 1.0), ("linear", 55, 0.6), ("linear", 100, 0.2),
        ("cosine", 10, 1.0), ("cosine", 55, 0.6), ("cosine", 100, 0.2),
    ],
)  # fmt: skip
def test_schedule(decay, step, share):
    schedule = ScheduleSpec(warmup_steps=10, decay=decay, final_fraction=0.2)
    assert learning_rate(OptimizerSpec(lr=2.0, schedule=schedule), step, 100) == pytest.approx(2.0 * share)


def test_schedule_holds_until_its_decay_starts():
    o = OptimizerSpec(lr=1.0, schedule=ScheduleSpec(decay="linear", decay_steps=20, final_fraction=0.0))
    rates = [learning_rate(o, step, 100) for step in (1, 80, 90, 100)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_weight_decay_is_decoupled_and_spares_gains(reference):
    runs = [reference(optimizer={"name": "adamw", "weight_decay": decay, "lr": 0.01}) for decay in (0.0, 0.5)]
    for r in runs:
        r.run_step()
    start = weights(reference().stages)
    lr = learning_rate(runs[0].spec.optimizer, 1, runs[0].spec.steps)
    free, decayed = (weights(r.stages) for r in runs)
    for name, before in start.items():
        shrink = 0.0 if "norm" in name else lr * 0.5
        assert torch.allclose(decayed[name], free[name] - shrink * before, atol=1e-7), name


@pytest.mark.parametrize(("form", "name"), [("reparam", "muon"), ("constrained", "row_adamw")])
def test_moments_that_are_not_kept_need_not_follow_the_basis(reference, form, name):
    update = {"interval": 2, "window": 1, "delay": 0, "move": "project"}
    r = reference(
        subspace={"form": form, "update": update}, optimizer={"name": name, "tables": "row_adamw", "beta1": 0.0}
    )
    assert [row["version"] for row in r.train() if row["event"] == "switch"] == [1, 2]
    embedding = next(p for p in r.trainers[0].optimizer.parameters if p.name == "embed.weight")
    assert set(embedding.state) == {"second"}


def test_a_step_without_gradients_is_refused_and_changes_nothing():
    r = make_reference(stages=1)
    optimizer, before = r.trainers[0].optimizer, r.weights_sha256()
    with pytest.raises(RuntimeError):
        optimizer.apply(1e-3, 1.0)
    with pytest.raises(RuntimeError):
        optimizer.prepare()  # of no microbatch
    assert (optimizer.applied, r.weights_sha256()) == (0, before)
    r.accumulate(1)
    r.prepare()
    optimizer.apply(1e-3, 1.0)
    moved = r.weights_sha256()
    with pytest.raises(RuntimeError):
        optimizer.apply(1e-3, 1.0)
    assert (optimizer.applied, r.weights_sha256()) == (1, moved)
    assert moved != before
