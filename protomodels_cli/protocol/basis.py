"""U's bytes: how the first basis of a run is made, how one is hashed and checked. Numpy only.

By rows in memory: LAPACK gives columns, and a product may round differently with the other layout.
"""

from __future__ import annotations

import hashlib

import numpy as np

from protomodels_cli import counter


def initial_u(width: int, k: int, seed: int, dtype: str) -> np.ndarray:
    """A uniformly random subspace. Made once per run and sent as bytes: QR's last bits differ by platform."""
    import torch

    generator = torch.Generator().manual_seed(counter.subseed(seed, "basis") >> 1)
    gaussian = torch.randn(width, k, generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(gaussian)
    return np.ascontiguousarray(q.numpy().astype(dtype))


def u_from_bytes(content: bytes, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """U by rows, little-endian, in its own type. Raises ValueError where the bytes are too many or too few."""
    belongs = shape[0] * shape[1] * np.dtype(dtype).itemsize
    if len(content) != belongs:
        raise ValueError(f"a basis of {len(content)} bytes where {belongs} belong")
    return np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).reshape(shape).astype(dtype)


def u_sha256(u: np.ndarray) -> str:
    digest = hashlib.sha256(f"basis torch.{u.dtype.name} {u.shape}\n".encode())
    digest.update(u.tobytes())
    return digest.hexdigest()


def orthonormality_error(u: np.ndarray) -> float:
    """‖UᵀU − I‖_F, in float64."""
    wide = u.astype(np.float64)
    return float(np.linalg.norm(wide.T @ wide - np.eye(u.shape[1])))
