"""One run of a sweep: how it is trained and measured, and the name that its result is kept under.

Nothing here knows which runs are compared with which.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from protomodels_cli.cost.traffic import boundary_bytes, id_bytes
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.errors import RunStopped
from protomodels_cli.lab.recipes import Recipe, spec_of
from protomodels_cli.lab.results import Result
from protomodels_cli.lab.scales import Scale, text_of
from protomodels_cli.lab.trained import Trained, free
from protomodels_cli.spec.schema import RunSpec

TRAINING = 3  # to be raised when `train` changes: results kept from before are then not taken for its own
TRAINING_ANCHORS = 3  # the same, of what only trained anchors depend on
# Sections of a spec. The others say how a run is led.
TRAINED_BY = {"seed", "steps", "stages", "model", "subspace", "optimizer", "groups", "batch", "wire", "eval"}
TRAINED_BY |= {"compute", "tokenizer"}
CURVE_POINTS = 60


@dataclass(frozen=True)
class Run:
    scale: Scale
    recipe: Recipe
    seed: int
    device: str

    def spec(self) -> RunSpec:
        return spec_of(self.scale, self.recipe, self.seed)

    def reference(self) -> Trained:
        return Trained(self.spec(), self.scale, self.recipe, self.device)

    def key(self) -> str:
        """Names the run that a kept result belongs to: by its text's tokens, wherever the files lie."""
        spec = self.spec()
        own = spec.model_dump(mode="json", include=TRAINED_BY, exclude_none=True)
        for name in ("anchor_tokens", "early_loss"):  # which are told below, by those who have them
            own["subspace"].pop(name)
        sharing = None if self.recipe.sharing is None else asdict(self.recipe.sharing)
        kind = self.device.partition(":")[0]
        parts = [own, sharing, text_of(self.scale).sha256, kind, TRAINING]
        parts += [TRAINING_ANCHORS, spec.anchor_tokens] if self.recipe.trains_anchors else []
        parts += [f"early loss {spec.early_loss}, heads from 0"] if spec.early_loss else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def tokens(self) -> int:
        return self.scale.tokens

    @property
    def flops(self) -> float:
        return self.tokens * sum(unit_flops(self.spec()).values())

    @property
    def name(self) -> str:
        return f"d={self.scale.width} {self.recipe.name} seed {self.seed}"


def train(run: Run) -> Result:
    """Train one model through all of its boundaries: its losses, what crossed the wire, and the time it took."""
    started = time.monotonic()
    free()
    spec = run.spec()
    reference = run.reference()
    steps: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    stopped = None
    try:
        for row in reference.train():
            if row["event"] == "step":
                steps.append(row)
            elif row["event"] == "eval":
                evals.append({"step": row["step"], "loss": finite(row["loss"])})
    except RunStopped as e:
        stopped = str(e)
    boundaries = len(reference.stages) - 1
    tokens = len(steps) * run.scale.tokens_per_step
    payload = sum(reference.carrier.payload_bytes[leg] for leg in ("forward", "backward")) / tokens / boundaries
    planned = boundary_bytes(spec)
    return {
        "loss": None if stopped else evals[-1]["loss"],
        "loss_tuning": None if stopped else finite(reference.evaluate(held_out=reference.text.tuning)),
        "stopped": stopped,
        "bytes_per_token": payload + id_bytes(spec) + reference.bytes_of_sums,
        "bytes_of_sums": reference.bytes_of_sums,
        "bytes_by_arithmetic": planned["forward"] + planned["backward"],
        "stages": len(reference.stages),
        "compute_seconds": median(row["seconds"] for row in steps) / len(reference.stages),
        "parameters": reference.parameter_counts(),
        "flops_per_token": sum(unit_flops(spec).values()),
        "tokens": tokens,
        "flops": run.flops,
        "seconds": time.monotonic() - started,
        "width": run.scale.width,
        "curve": smoothed(steps),
        "evals": evals,
        **reference.facts(),
    }


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def smoothed(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training loss in at most CURVE_POINTS points, each the mean of the steps since the last."""
    size = math.ceil(len(steps) / CURVE_POINTS)
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [{"step": part[-1]["step"], "loss": finite(mean(row["loss"] for row in part))} for part in parts]
