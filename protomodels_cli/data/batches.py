"""Batches: windows of T+1 tokens, as a pure function of (seed, step, microbatch).

A window's T inputs and T targets overlap, so the last stage has every target. Neighbouring windows share one
token: over an epoch every token but the first is a target exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protomodels_cli import counter
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.shards import TokenStream
from protomodels_cli.errors import EXIT_SPEC
from protomodels_cli.spec.schema import RunSpec

_ROUNDS = 6


class NotRevisited(DataError):
    exit_code = EXIT_SPEC


class Batches:
    def __init__(self, stream: TokenStream, spec: RunSpec):
        self.stream, self.context, self.seed = stream, spec.model.context, spec.seed
        self.batch, self.microbatch_size = spec.batch.size, spec.batch.size // spec.batch.microbatches
        self.sampling = spec.data.sampling
        self.windows = (len(stream) - 1) // self.context
        why = parse_codec(spec.wire.forward).codec.needs_revisits
        if why and spec.steps * spec.batch.size <= self.windows:
            raise NotRevisited(
                f"wire.forward = {spec.wire.forward}: {why}, and {spec.steps} steps of "
                f"{spec.batch.size} samples are less than one epoch ({self.windows} samples)",
                f"train for more than {self.windows // spec.batch.size} steps, on less data, or with another codec",
                "not_revisited",
            )

    def microbatch(self, step: int, microbatch: int) -> np.ndarray:
        """Its windows of token ids, (B, T+1). Steps count from 1, microbatches from 0."""
        first = (step - 1) * self.batch + microbatch * self.microbatch_size
        windows = [self.window(first + i) for i in range(self.microbatch_size)]
        width = self.context if self.sampling == "epochs" else 1
        return np.stack([self.stream.read(i * width, self.context + 1) for i in windows])

    def window(self, sample: int) -> int:
        """Which of the text's windows a sample is; samples count over all steps."""
        if self.sampling == "random":
            starts = len(self.stream) - self.context
            return counter.word(counter.subseed(self.seed, "random windows"), sample) % starts
        epoch, index = divmod(sample, self.windows)
        return permuted(index, self.windows, counter.subseed(self.seed, "epoch", epoch))


def permuted(index: int, size: int, key: int) -> int:
    """Where `index` goes in a permutation of range(size) picked by `key`: a Feistel network, walked until it
    lands inside. Needs no table, so an epoch may have any number of windows."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for r in range(_ROUNDS):
            left, right = right, left ^ (counter.word(key + r, right) & mask)
        index = left << half | right
        if index < size:
            return index


def held_out_windows(stream: TokenStream, spec: RunSpec) -> Iterator[np.ndarray]:
    """The evaluation's windows, spread evenly over the held-out text, in microbatches of the run's own size."""
    there = (len(stream) - 1) // spec.model.context
    count = min(spec.eval.windows, there)
    starts = [i * there // count * spec.model.context for i in range(count)]
    size = spec.batch.size // spec.batch.microbatches
    for i in range(0, count, size):
        yield np.stack([stream.read(s, spec.model.context + 1) for s in starts[i : i + size]])
