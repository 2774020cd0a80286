"""U, the basis of the subspace S: one for the whole run, versioned, hashed from its bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from protomodels_cli import counter


@dataclass(frozen=True)
class Basis:
    """An orthonormal d×k matrix and its place in the run's history of bases.

    By rows in memory: LAPACK gives columns, and a product may round differently with the other layout, which a basis
    that came over the wire would not have."""

    version: int
    u: Tensor

    def __post_init__(self) -> None:
        assert self.u.is_contiguous()

    @cached_property
    def sha256(self) -> str:
        return hash_of(self.u)

    def copy_to(self, device: torch.device | str) -> Basis:
        """A stage's own bytes: what it computes with is what it hashes, and nobody else's."""
        return Basis(self.version, self.u.to(device, copy=True))

    @property
    def orthonormality_error(self) -> float:
        """‖UᵀU − I‖_F, in float64."""
        u = self.u.double()
        return float(torch.linalg.matrix_norm(u.T @ u - torch.eye(u.shape[1], dtype=u.dtype, device=u.device)))


def hash_of(u: Tensor) -> str:
    u = u.detach().cpu().contiguous()
    digest = hashlib.sha256(f"basis {u.dtype} {tuple(u.shape)}\n".encode())
    digest.update(u.numpy().tobytes())
    return digest.hexdigest()


def basis_to_bytes(basis: Basis) -> bytes:
    """U by rows, little-endian, in its own type."""
    return basis.u.detach().cpu().contiguous().numpy().tobytes()


def basis_from_bytes(version: int, content: bytes, shape: tuple[int, int], dtype: torch.dtype) -> Basis:
    u = torch.empty(shape, dtype=dtype)
    if len(content) != u.nbytes:
        raise ValueError(f"a basis of {len(content)} bytes where {u.nbytes} belong")
    u.numpy().reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
    return Basis(version, u)


def initial_basis(width: int, k: int, seed: int, dtype: torch.dtype = torch.float32) -> Basis:
    """A uniformly random subspace. Made once per run and sent as bytes: QR's last bits differ by platform."""
    generator = torch.Generator().manual_seed(counter.subseed(seed, "basis") >> 1)
    gaussian = torch.randn(width, k, generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(gaussian)
    return Basis(0, q.to(dtype).contiguous())


def principal_angles(a: Tensor, b: Tensor) -> Tensor:
    """Angles between span(a) and span(b), ascending, exact for small angles too."""
    a, b = a.double(), b.double()
    cosines = torch.linalg.svdvals(a.T @ b)  # descending: the smallest angle first
    sines = torch.linalg.svdvals(b - a @ (a.T @ b)).flip(0)
    return torch.atan2(sines, cosines)
