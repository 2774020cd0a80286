"""U, the basis of the subspace S, as a stage computes with it: one for the whole run, versioned, hashed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from protomodels_cli.protocol.basis import initial_u, orthonormality_error, u_from_bytes, u_sha256


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

    def as_type(self, dtype: torch.dtype) -> Tensor:
        """U for products in this type."""
        if dtype == self.u.dtype:
            return self.u
        cast: dict[torch.dtype, Tensor] = self.__dict__.setdefault("_cast", {})
        if dtype not in cast:
            cast[dtype] = self.u.to(dtype)
        return cast[dtype]

    @property
    def orthonormality_error(self) -> float:
        return orthonormality_error(_numpy(self.u))


def _numpy(u: Tensor) -> np.ndarray:
    return u.detach().cpu().contiguous().numpy()


def hash_of(u: Tensor) -> str:
    return u_sha256(_numpy(u))


def basis_to_bytes(basis: Basis) -> bytes:
    """U by rows, little-endian, in its own type."""
    return _numpy(basis.u).tobytes()


def basis_from_bytes(version: int, content: bytes, shape: tuple[int, int], dtype: torch.dtype) -> Basis:
    return Basis(version, torch.from_numpy(u_from_bytes(content, shape, _name(dtype))))


def initial_basis(width: int, k: int, seed: int, dtype: torch.dtype = torch.float32) -> Basis:
    return Basis(0, torch.from_numpy(initial_u(width, k, seed, _name(dtype))))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def principal_angles(a: Tensor, b: Tensor) -> Tensor:
    """Angles between span(a) and span(b), ascending, exact for small angles too."""
    a, b = a.double(), b.double()
    cosines = torch.linalg.svdvals(a.T @ b)  # descending: the smallest angle first
    sines = torch.linalg.svdvals(b - a @ (a.T @ b)).flip(0)
    return torch.atan2(sines, cosines)
