"""The shape of a model of about so many parameters, in layers that a number of stages divides. Pure.

Nothing here knows peers, links or memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from protomodels_cli.errors import OptionError
from protomodels_cli.spec.hidden import usual_hidden

SMALLEST, LARGEST = 1e5, 1e12
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BY_SIZE = (  # parameters below; tokens of a window, of a step, and of the vocabulary
    (3e6, 64, 4096, 1024),
    (3e7, 256, 16_384, 4096),
    (3e8, 1024, 65_536, 16_384),
    (3e9, 2048, 262_144, 32_768),
    (math.inf, 2048, 524_288, 32_768),
)
MOST_LAYERS = 128
OFF_SIZE = 4.0  # how much worse it is to miss the size than to miss the usual proportions by the same factor


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    vocabulary: int
    step_tokens: int  # that a step should have

    @property
    def parameters(self) -> int:
        """Of the dense model."""
        inner, kv = self.width, self.width // self.heads * self.kv_heads
        block = self.width * (2 * inner + 2 * kv + 3 * usual_hidden(self.width) + 2)
        return self.layers * block + 2 * self.vocabulary * self.width


def parse_size(text: str) -> float:
    """10M, 1.5B, 124m → parameters."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbgt])", text.strip().lower())
    size = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not SMALLEST <= size <= LARGEST:
        raise OptionError(
            f"--size {text}: must be a number of parameters from 100K to 1T",
            "write for example 10M, 124M or 1.5B",
            "size",
        )
    return size


def shape_of(parameters: float, stages: int = 1, vocabulary: int | None = None) -> Shape:
    """The one nearest to the size and to the usual proportions, with so many stages of equal layers."""
    _, context, step_tokens, usual = next(row for row in _BY_SIZE if parameters < row[0])
    words = vocabulary or usual
    proportion = min(128.0, max(32.0, 64 * (parameters / 1e9) ** (1 / 3)))  # width to layers: 64 at 1B, 128 at 8B
    best, least = None, math.inf
    for width in (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256), *range(2048, 16_385, 512)):
        one = _shape(1, width, context, words, step_tokens)
        block = one.parameters - 2 * words * width
        wanted = (parameters - 2 * words * width) / block
        for layers in {max(1, math.floor(wanted / stages)) * stages, max(1, math.ceil(wanted / stages)) * stages}:
            shape = _shape(layers, width, context, words, step_tokens)
            off = OFF_SIZE * abs(math.log(shape.parameters / parameters))
            off += abs(math.log(width / layers / proportion))
            if off < least and (layers <= MOST_LAYERS or layers == stages):
                best, least = shape, off
    assert best is not None
    return best


def _shape(layers: int, width: int, context: int, vocabulary: int, step_tokens: int) -> Shape:
    head = 128 if width >= 2048 else 64 if width >= 256 else 32
    heads = width // head
    kv = heads // 4 if heads % 4 == 0 and width >= 1024 else heads
    return Shape(layers, width, heads, kv, context, vocabulary, step_tokens)
