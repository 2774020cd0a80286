"""U's bytes: how the first basis of a run is made, how one is hashed and checked. Numpy only.

By rows in memory: LAPACK gives columns, and a product may round differently with the other layout.
"""

from __future__ import annotations

import hashlib

import numpy as np

from protomodels_cli import counter


def initial_u(width: int, k: int, seed: int, dtype: str) -> np.ndarray:
    """A uniformly random subspace: the Q of Gaussian numbers. Made once per run and sent as bytes, since the last bits
    of QR, logarithm and cosine differ by platform."""
    q, _ = np.linalg.qr(_gaussian(width * k, counter.subseed(seed, "basis")).reshape(width, k))
    return np.ascontiguousarray(q.astype(dtype))


def _gaussian(count: int, seed: int) -> np.ndarray:
    """Box–Muller in float64: words 2i and 2i + 1 of the stream give numbers 2i and 2i + 1."""
    words = counter.words(seed, 0, count + count % 2) >> np.uint64(11)  # 53 bits: what a float64 holds exactly
    radius = np.sqrt(-2 * np.log((words[0::2] + np.uint64(1)) * 2.0**-53))  # of (0, 1]: the logarithm is finite
    angle = words[1::2] * (2 * np.pi * 2.0**-53)
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1).reshape(-1)[:count]


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
