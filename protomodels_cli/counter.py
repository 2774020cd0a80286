"""Random bits as a pure function of (seed, index), in integer arithmetic only: the same on every platform.

SplitMix64 (Steele, Lea, Flood 2014): entry i is a finalised multiple of an odd constant. No state, no libm.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def words(seed: int, start: int, count: int) -> np.ndarray:
    """Words start … start+count of the stream of `seed`, as uint64."""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return _finalise(np.uint64(seed & _MASK) + index * _GAMMA)


def _finalise(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def word(seed: int, index: int) -> int:
    """One word of the stream, in plain Python integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def subseed(seed: int, *names: str | int) -> int:
    """A seed of its own for each named purpose, so that no two streams of a run are the same."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
