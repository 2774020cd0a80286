"""A training step's arithmetic, written once for reference, worker and coordinator.

What a step's loss and norms decide, the learning rate, and the calendar of U's moves and reports. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protomodels_cli.spec.model import SubspaceSpec, UpdateSpec
    from protomodels_cli.spec.optimizer import OptimizerSpec
    from protomodels_cli.spec.schema import RunSpec


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


def early_weight(spec: RunSpec, step: int) -> float:
    """Of the segments' own losses in that of step `step`: linearly to 0 at half of the steps."""
    return spec.early_loss * max(0.0, 1.0 - 2.0 * step / spec.steps)


def units(layers: Sequence[int], stage: int) -> list[str]:
    """What this stage reports a squared norm for, in layer order."""
    first = sum(layers[:stage])
    own = [f"layers.{i}" for i in range(first, first + layers[stage])]
    return ["embed"] * (stage == 0) + own + ["head"] * (stage == len(layers) - 1)


def gradient_norm(squared_norms: Iterable[float]) -> float:
    """The whole gradient's norm: the units' squared norms added in layer order, in float64."""
    total = 0.0
    for squared in squared_norms:
        total += squared
    return math.sqrt(total)


def clip_coefficient(norm: float, clip: float) -> float:
    return clip / norm if clip > 0 and norm > clip else 1.0


@dataclass(frozen=True)
class Outcome:
    """What becomes of a step."""

    apply: bool  # false: the loss or a gradient is not finite, and the step is skipped
    lr: float
    clip: float  # what gradients are multiplied with
    loss: float  # mean of the step's tokens
    norm: float  # of the whole gradient, before it is clipped
    tokens: int


def decide(spec: RunSpec, step: int, loss_sum: float, squared_norms: Sequence[float]) -> Outcome:
    """Decide a step from its tokens' summed loss and the squared norm of each unit's gradient, in layer order."""
    tokens = spec.batch.size * spec.model.context
    loss, norm = loss_sum / tokens, gradient_norm(squared_norms)
    finite = math.isfinite(loss) and all(map(math.isfinite, squared_norms))
    clip = clip_coefficient(norm, spec.optimizer.clip) if finite else 0.0
    return Outcome(finite, learning_rate(spec.optimizer, step, spec.steps), clip, loss, norm, tokens)


def is_due(step: int, interval: int) -> bool:
    """Of what is done every so many steps; 0: never."""
    return interval > 0 and step % interval == 0


def reprojects_after(subspace: SubspaceSpec, step: int) -> bool:
    """Whether constrained weights are put back into S after this step."""
    return is_due(step, subspace.reproject_interval)


def gathers(subspace: SubspaceSpec, step: int) -> bool:
    """Whether the gradients of this step (from 1) are gathered: for the next update or, where U stays, the metrics."""
    update = subspace.update
    if not subspace.has_basis:
        return False
    if update.interval == 0:
        return step % subspace.sync_interval == 0
    return (step - 1) % update.interval >= update.interval - update.window


def reports(subspace: SubspaceSpec, step: int) -> bool:
    """Whether this step ends a gathering, with a new basis or, where U stays, with its quantities only."""
    return subspace.has_basis and step % (subspace.update.interval or subspace.sync_interval) == 0


def last_report(subspace: SubspaceSpec, step: int) -> int:
    """The last step up to this one that ends a gathering; 0: none has."""
    if not subspace.has_basis:
        return 0
    return step - step % (subspace.update.interval or subspace.sync_interval)


def first_step_with(update: UpdateSpec, computed_after: int) -> int:
    """The step before which all stages switch to a basis computed after `computed_after`."""
    return computed_after + 1 + update.delay


# What the end of a gathering says of the subspace.
REPORTED = (
    "orthonormality_error",
    "eigenvalue_min",
    "eigenvalue_max",
    "angle_max",
    "angle_mean",
    "captured_before",
    "captured_after",
)
