"""The hash of a model's weights, from hashes that its stages can make on different machines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def parameter_sha256(dtype: str, shape: tuple[int, ...], content: bytes | memoryview) -> str:
    """The hash of one parameter: of its type (float32 or float64), its shape, and its bytes by rows."""
    digest = hashlib.sha256(f"torch.{dtype} {shape}\n".encode())
    digest.update(content)
    return digest.hexdigest()


def weights_sha256(parameters: Iterable[tuple[str, str]]) -> str:
    """The hash of a model: of all parameters' hashes in layer order. It does not depend on the cut into stages."""
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in parameters)
    return hashlib.sha256(lines.encode()).hexdigest()
