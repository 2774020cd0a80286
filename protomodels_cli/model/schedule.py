"""The learning rate as a pure function of the step, and the clip coefficient of the squared norms."""

from __future__ import annotations

import math
from collections.abc import Iterable

from protomodels_cli.spec.schema import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int, steps: int) -> float:
    """The rate of step `step`, counted from 1."""
    s = optimizer.schedule
    if step <= s.warmup_steps:
        return optimizer.lr * step / s.warmup_steps
    if s.decay == "constant":
        return optimizer.lr
    fall = s.decay_steps or max(1, steps - s.warmup_steps)
    done = min(1.0, max(0.0, (step - (steps - fall)) / fall))
    left = 1.0 - done if s.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr * (s.final_fraction + (1.0 - s.final_fraction) * left)


def gradient_norm(squared_norms: Iterable[float]) -> float:
    """The whole gradient's norm: the layers' squared norms added in layer order, in float64."""
    total = 0.0
    for squared in squared_norms:
        total += squared
    return math.sqrt(total)


def clip_coefficient(norm: float, clip: float) -> float:
    return clip / norm if clip > 0 and norm > clip else 1.0
