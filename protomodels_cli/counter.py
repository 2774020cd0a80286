"""Random bits as a pure function of (seed, index), in integer arithmetic only: the same on every platform.

SplitMix64 (Steele, Lea, Flood 2014): entry i is a finalised multiple of an odd constant. No state, no libm.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def words(seed: int, start: int, count: int) -> np.ndarray:
    """Words start … start+count of the stream of `seed`, as uint64."""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return _finalise(np.uint64(seed & _MASK) + index * np.uint64(_GAMMA))


def _finalise(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words_on(seed: int | torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Words 0 … count of the stream of `seed` as torch sees them: int64 with the top bit cleared, on any device."""
    return _signed_words(seed, 0, count, device) & 0x7FFFFFFFFFFFFFFF


def quarters_on(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers of 16 bits, start … start+count of the stream of `seed`, as int16: every word is four, lowest first."""
    import torch

    first, end = start // 4, -(-(start + count) // 4)
    quarters = _signed_words(seed, first, end - first, device).view(torch.int16)
    return quarters[start - 4 * first :][:count]


def _signed_words(seed: int | torch.Tensor, start: int, count: int, device: torch.device) -> torch.Tensor:
    import torch

    z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * signed(_GAMMA)
    z = z + (signed(seed) if isinstance(seed, int) else seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * signed(factor)
    return z ^ _shifted(z, 31)


def signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """A logical right shift: torch's own keeps the sign."""
    return (z >> by) & ((1 << 64 - by) - 1)


def word(seed: int, index: int) -> int:
    """One word of the stream, in plain Python integers."""
    z = (seed + (index + 1) * _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def subseed(seed: int, *names: str | int) -> int:
    """A seed of its own for each named purpose, so that no two streams of a run are the same."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
