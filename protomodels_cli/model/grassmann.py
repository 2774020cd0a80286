"""Moving the subspace: descent on the Grassmann manifold along the stream's gradients, in float64.

A = Σ GᵀG, with G = ∂loss/∂x where the stream leaves S (the last stage): maximise tr(UᵀAU), the gradient
energy that S captures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protomodels_cli.model.basis import Basis, principal_angles
from protomodels_cli.model.precise import home_of_float64, to_float64


class GradientCovariance:
    """A, gathered over the steps of a window. A step's share counts once the step is applied."""

    def __init__(self, width: int, device: torch.device):
        self.total = torch.zeros(width, width, dtype=torch.float64, device=home_of_float64(device))
        self._staged = torch.zeros_like(self.total)

    def add(self, gradient: Tensor) -> None:
        """For `Stage.on_release`: one microbatch's gradient, (…, d)."""
        g = gradient.detach().flatten(0, -2)
        self._staged += to_float64(g.T @ g)

    def commit(self) -> None:
        self.total += self._staged
        self._staged.zero_()

    def discard(self) -> None:
        self._staged.zero_()


def captured(a: Tensor, u: Tensor) -> float:
    """Share of the gradient energy that lies in span(u)."""
    u = u.double()
    return float((u * (a @ u)).sum() / a.trace())


def largest_eigenvalue(a: Tensor, steps: int = 32) -> float:
    """By Lanczos from a's own heaviest column: no randomness, d² work a step, exact once `steps` reaches d."""
    basis = a[:, [int(a.diagonal().argmax())]]
    basis = basis / torch.linalg.vector_norm(basis)
    for _ in range(min(steps, len(a)) - 1):
        new = a @ basis[:, -1:]
        for _ in range(2):  # twice is enough to keep it orthogonal
            new = new - basis @ (basis.T @ new)
        size = torch.linalg.vector_norm(new)
        if size <= 1e-12 * a.trace():  # the space is invariant: the answer is in it
            break
        basis = torch.cat((basis, new / size), dim=1)
    return float(torch.linalg.eigvalsh(basis.T @ a @ basis)[-1])


def moved(basis: Basis, a: Tensor, step_size: float, inner_steps: int) -> Basis:
    """The next basis: `inner_steps` of U − η·R retracted by QR, with columns aligned to the old ones."""
    old = basis.u.double()
    a = a / largest_eigenvalue(a)
    u = old
    for _ in range(inner_steps):
        euclidean = -2 * (a @ u)
        tangent = euclidean - u @ (u.T @ euclidean)
        u, _ = torch.linalg.qr(u - step_size * tangent)
    return Basis(basis.version + 1, align(u, old).to(basis.u.dtype).contiguous())


def align(u: Tensor, old: Tensor) -> Tensor:
    """Among the bases of span(u), the one nearest to `old`.

    QR leaves signs and rotations arbitrary; without this a coordinate is negated now and then. UᵀU′ becomes
    symmetric positive, so no column turns by more than the largest principal angle.
    """
    p, _, qt = torch.linalg.svd(u.T @ old)
    return u @ (p @ qt)


def report(old: Basis, new: Basis, a: Tensor) -> dict[str, float]:
    """What goes into the metrics of every run: at each update, or, where U stays (old is new), at each sync."""
    u = new.u.double()
    eigenvalues = torch.linalg.eigvalsh(u.T @ u)
    angles = principal_angles(old.u, new.u)
    return {
        "orthonormality_error": new.orthonormality_error,
        "eigenvalue_min": float(eigenvalues[0]),
        "eigenvalue_max": float(eigenvalues[-1]),
        "angle_max": float(angles[-1]),
        "angle_mean": float(angles.mean()),
        "captured_before": captured(a, old.u),
        "captured_after": captured(a, new.u),
    }
