"""One stage in training: a step's two halves and the move to a new basis, for the reference and the worker alike.

Knows no neighbours: how messages cross a boundary, and who decides a step, is its caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from protomodels_cli.cost.activations import Recompute
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.gathering import Gathering
from protomodels_cli.model.optim import StageOptimizer
from protomodels_cli.model.shape import Slice
from protomodels_cli.model.stage import Layout, Stage
from protomodels_cli.model.state import load_stage_state, section_of, stage_state
from protomodels_cli.protocol import steps
from protomodels_cli.spec.schema import RunSpec


class StageTrainer:
    def __init__(
        self,
        spec: RunSpec,
        slice_: Slice,
        basis: Basis | None,
        device: torch.device | str | Layout = "cpu",
        recompute: Recompute = "none",
        draw: bool = True,
    ):
        self.spec = spec
        self.stage = Stage(spec, slice_, basis, device, recompute, draw)
        self.optimizer = StageOptimizer(self.stage, spec)
        self.gathering = Gathering(spec, self.stage) if slice_.is_last else None

    def begin(self, step: int) -> None:
        """Call before the first microbatch of a step."""
        self.stage.early_weight = steps.early_weight(self.spec, step)
        if self.gathering is not None:
            self.gathering.begin(step)

    def prepare(self) -> dict[str, float]:
        """After the last microbatch: keep the gradients. Returns the squared norm of each unit, in layer order."""
        if self.gathering is not None:
            self.gathering.end()
        return self.optimizer.prepare()

    def decide(self, step: int, apply: bool, lr: float, clip: float) -> None:
        """Take the step with what was prepared, or skip it."""
        if apply:
            self.optimizer.apply(lr, clip)
            if steps.reprojects_after(self.spec.subspace, step):
                self.optimizer.reproject()
        else:
            self.optimizer.discard()
        if self.gathering is not None:
            self.gathering.decide(apply)

    def abandon(self) -> None:
        """Forget whatever was done for a step that will be done again."""
        self.optimizer.discard()
        if self.gathering is not None:
            self.gathering.end()
            self.gathering.decide(False)

    def report(self, step: int) -> tuple[dict[str, Any], Basis | None] | None:
        """On the last stage, at the end of a gathering: what the metrics say of it, and the basis that comes next."""
        assert self.gathering is not None
        return self.gathering.report(step)

    def switch_basis(self, new: Basis) -> None:
        self.optimizer.switch_basis(new, self.spec.subspace.update.move)

    def state(self, codecs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The stage's whole state, with the memories of the codecs at its boundaries: the tensors themselves."""
        gathered = {} if self.gathering is None else self.gathering.state()
        return stage_state(self.stage, self.optimizer, codecs, gathered)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        load_stage_state(self.stage, self.optimizer, saved)
        if self.gathering is not None:
            self.gathering.load(section_of(saved, "gathered"))
