"""Moving the subspace: orthonormal for ever, no column turned round, and weights that follow as stated."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.lab.grassmann import judge
from protomodels_cli.lab.reconstruct import relative
from protomodels_cli.model import grassmann
from protomodels_cli.model.basis import Basis, initial_basis, principal_angles
from protomodels_cli.protocol import steps
from protomodels_cli.spec.model import SubspaceSpec, UpdateSpec


def covariance(d: int, seed: int, rank: int = 6) -> torch.Tensor:
    """Gradients with a few strong directions and noise."""
    g = torch.Generator().manual_seed(seed)
    strong = torch.randn(50, rank, generator=g, dtype=torch.float64) @ torch.randn(
        rank, d, generator=g, dtype=torch.float64
    )
    noise = torch.randn(200, d, generator=g, dtype=torch.float64)
    return strong.T @ strong + noise.T @ noise


@pytest.mark.full
def test_orthonormal_after_1000_updates_as_stored_in_float32():
    basis = initial_basis(48, 6, 0)
    for i in range(1000):
        basis = grassmann.moved(basis, covariance(48, i), 0.5, 1)
    assert basis.version == 1000
    assert basis.u.dtype == torch.float32
    assert basis.orthonormality_error <= 1e-6


def worst_turn(old: torch.Tensor, new: torch.Tensor) -> float:
    """By how much the most-turned column exceeds the largest principal angle."""
    cosines = (old.double() * new.double()).sum(0).clamp(-1, 1)
    return float(torch.arccos(cosines).max() - principal_angles(old, new)[-1])


def test_no_column_turns_by_more_than_the_principal_angle_in_300_updates():
    basis = initial_basis(48, 6, 1)
    raw_flips = 0
    for i in range(300):
        a = covariance(48, i)
        new = grassmann.moved(basis, a, 0.5, 1)
        assert worst_turn(basis.u, new.u) < 1e-3
        raw, _ = torch.linalg.qr(new.u.double())
        raw_flips += worst_turn(basis.u, raw) > 1e-3
        basis = new
    assert raw_flips > 20, "without alignment QR turns columns round, and this test sees it"


@given(seed=st.integers(0, 1000), k=st.integers(1, 8))
def test_alignment_keeps_the_span_and_is_the_nearest_basis(seed, k):
    g = torch.Generator().manual_seed(seed)
    old, u = (torch.linalg.qr(torch.randn(16, k, generator=g, dtype=torch.float64))[0] for _ in range(2))
    found = grassmann.align(u, old)
    assert float(principal_angles(u, found)[-1]) < 1e-7
    product = old.T @ found
    assert torch.allclose(product, product.T, atol=1e-10)
    turn, _ = torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64))
    assert torch.linalg.norm(found - old) <= torch.linalg.norm(u @ turn - old) + 1e-12


def test_updates_find_the_principal_subspace():
    """The optimum is known: the top eigenvectors of A."""
    a = covariance(48, 3)
    best = torch.linalg.eigh(a)[1][:, -6:]
    basis = initial_basis(48, 6, 2, torch.float64)
    captured = [grassmann.captured(a, basis.u)]
    for _ in range(60):
        basis = grassmann.moved(basis, a, 0.5, 1)
        captured.append(grassmann.captured(a, basis.u))
    assert all(after >= before - 1e-12 for before, after in pairwise(captured))
    assert captured[-1] == pytest.approx(grassmann.captured(a, best), rel=1e-6)


def test_inner_steps_are_updates_on_the_same_gradients():
    a, basis = covariance(48, 5), initial_basis(48, 6, 0, torch.float64)
    at_once = grassmann.moved(basis, a, 0.5, 3)
    one_by_one = basis
    for _ in range(3):
        one_by_one = grassmann.moved(one_by_one, a, 0.5, 1)
    assert at_once.version == 1
    assert float(principal_angles(at_once.u, one_by_one.u)[-1]) < 1e-7


@given(st.integers(0, 500))
def test_largest_eigenvalue(seed):
    for d in (1, 12, 100):
        a = covariance(d, seed)
        assert grassmann.largest_eigenvalue(a) == pytest.approx(float(torch.linalg.eigvalsh(a)[-1]), rel=1e-4)
    low_rank = torch.outer(a[0], a[0])
    assert grassmann.largest_eigenvalue(low_rank) == pytest.approx(float(a[0].square().sum()))


def test_principal_angles_of_a_known_turn():
    a = torch.eye(4, dtype=torch.float64)[:, :2]
    b = a.clone()
    b[:, 1] = torch.tensor([0, math.cos(1e-9), math.sin(1e-9), 0], dtype=torch.float64)
    assert principal_angles(a, b).tolist() == pytest.approx([0, 1e-9], rel=1e-6, abs=1e-15)
    assert float(principal_angles(a, torch.eye(4)[:, 2:])[0]) == pytest.approx(math.pi / 2)


@pytest.mark.parametrize("form", ["constrained", "reparam"])
@pytest.mark.parametrize("move", ["transport", "project"])
def test_weights_and_moments_follow_the_basis(reference, form, move):
    optimizer = "row_adamw" if form == "constrained" else "adamw"
    r = reference(subspace={"form": form}, optimizer={"name": optimizer}, compute={"dtype": "float64"}, stages=1)
    for _ in range(3):
        r.run_step()
    old, new = r.basis, grassmann.moved(r.basis, covariance(32, 0), 0.5, 1)

    def full(trained, basis):
        return trained.parameter.detach().clone() if form == "constrained" else trained.parameter.detach() @ basis.u.T

    matrices = [s for s in r.trainers[0].optimizer.parameters if s.form.has_basis]
    before = {s.name: (full(s, old), {k: v.clone() for k, v in s.state.items()}) for s in matrices}
    r.trainers[0].optimizer.switch_basis(new, move)
    turn = old.u.T @ new.u
    for trained in matrices:
        w, state = before[trained.name]
        right = w @ old.u @ new.u.T if move == "transport" else w @ new.u @ new.u.T
        assert relative(full(trained, new), right) < 1e-12
        first = state["first"] if move == "transport" else state["first"] @ turn
        assert torch.allclose(trained.state["first"], first)
        if form == "constrained" or move == "transport":
            assert torch.equal(trained.state["second"], state["second"])
        else:
            assert torch.allclose(trained.state["second"], state["second"] @ (turn * turn))
    assert r.stages[0].basis.version == 1
    assert torch.equal(r.stages[0].basis.u, new.u)
    if move == "transport":
        assert sum(s.parameter.square().sum() for s in matrices).item() == pytest.approx(
            sum(
                w.square().sum() if form == "constrained" else (w @ old.u).square().sum() for w, _ in before.values()
            ).item()
        )


def test_muon_momentum_follows_too(reference):
    r = reference(subspace={"form": "constrained"}, optimizer={"name": "muon"}, stages=1)
    r.run_step()
    trained = next(s for s in r.trainers[0].optimizer.parameters if s.name == "layers.0.attn.o.weight")
    before, old, new = trained.state["first"].clone(), r.basis, grassmann.moved(r.basis, covariance(32, 0), 0.5, 1)
    r.trainers[0].optimizer.switch_basis(new, "project")
    assert torch.allclose(trained.state["first"], before @ (old.u.T @ new.u))


@pytest.mark.parametrize("form", ["constrained", "reparam"])
def test_a_run_switches_at_the_stated_step_and_stays_exact(reference, form):
    from protomodels_cli.lab.reconstruct import compare

    update = {"interval": 5, "window": 3, "delay": 2}
    r = reference(subspace={"form": form, "update": update}, steps=14, compute={"dtype": "float64"})
    rows = list(r.train())
    assert [(x["step"], x["version"], x["first_step"]) for x in rows if x["event"] == "subspace"] == [
        (5, 1, 8),
        (10, 2, 13),
    ]
    assert [(x["step"], x["version"]) for x in rows if x["event"] == "switch"] == [(8, 1), (13, 2)]
    assert [x["basis_version"] for x in rows if x["event"] == "step"] == [0] * 7 + [1] * 5 + [2] * 2
    errors = compare(r)
    assert max(*errors["forward"].values(), *errors["backward"].values()) <= 1e-12


def test_the_covariance_is_that_of_the_uncut_models_gradient(reference):
    """A = Σ GᵀG at the input of the first unconstrained block, the same wherever the model is cut."""
    found = []
    for stages in (1, 4):
        r = reference(
            subspace={"update": {"interval": 2, "window": 1, "delay": 1}}, stages=stages, compute={"dtype": "float64"}
        )
        r.run_step()
        assert r.trainers[-1].gathering.covariance is None, "outside the window"
        r.accumulate(2)
        r.trainers[-1].gathering.covariance.commit()
        found.append(r.trainers[-1].gathering.covariance.total)
    assert torch.allclose(found[0], found[1], rtol=1e-12)
    gradients = []
    r = reference(stages=1, compute={"dtype": "float64"})
    r.run_step()
    r.stages[0].on_release = gradients.append
    windows = [torch.from_numpy(r.batches.microbatch(2, m)) for m in range(2)]
    for w in windows:
        r.stages[0].run_loss(r.forward(w[:, :-1], 2, 0)[0], w[:, 1:], 1 / 64)
    right = sum(g.flatten(0, 1).T @ g.flatten(0, 1) for g in gradients)
    assert torch.allclose(found[0], right, rtol=1e-9)


def test_a_skipped_step_leaves_no_trace_in_the_covariance():
    c = grassmann.GradientCovariance(4, torch.device("cpu"))
    c.add(torch.full((2, 3, 4), float("nan")))
    c.discard()
    c.add(torch.ones(2, 3, 4))
    c.commit()
    assert torch.equal(c.total, torch.full((4, 4), 6.0, dtype=torch.float64))


@pytest.mark.parametrize(("step", "expected"), [(1, False), (7, False), (8, True), (10, True), (11, False), (18, True)])
def test_window(step, expected):
    moving = SubspaceSpec(update=UpdateSpec(interval=10, window=3))
    assert steps.gathers(moving, step) is expected
    assert steps.reports(moving, step) is (step == 10)
    still = SubspaceSpec(sync_interval=9)
    assert steps.gathers(still, step) is steps.reports(still, step) is (step in (9, 18))
    assert not steps.gathers(SubspaceSpec(form="dense"), step)


def turned(u: torch.Tensor, angle: float) -> torch.Tensor:
    """The first column turned towards the last axis."""
    new = u.clone()
    new[:, 0] = math.cos(angle) * u[:, 0]
    new[-1, 0] += math.sin(angle)
    return new


def test_the_verdict_tells_drift_from_swing():
    start = torch.eye(12, dtype=torch.float64)[:, :3]
    drifting = [turned(start, 0.02 * i) for i in range(40)]
    swinging = [turned(start, 0.2 * (i % 2)) for i in range(40)]
    growing = [turned(start, 0.0004 * i**2) for i in range(40)]
    assert judge(drifting)[0] == "stable"
    assert judge(swinging)[0] == "oscillating"
    assert judge(growing)[0] == "oscillating"


def test_initial_basis_is_random_and_orthonormal():
    a, b = initial_basis(64, 8, 0), initial_basis(64, 8, 1)
    assert a.orthonormality_error < 1e-6
    assert initial_basis(64, 8, 0, torch.float64).orthonormality_error < 1e-14
    assert float(principal_angles(a.u, b.u)[0]) > 0.3
    assert a.sha256 != b.sha256 != Basis(0, a.u.double()).sha256
