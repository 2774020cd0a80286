"""What the last stage does for moving the subspace: gather the stream's gradients, then say what basis comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from protomodels_cli.model import grassmann
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.stage import Stage
from protomodels_cli.protocol import steps
from protomodels_cli.spec.schema import RunSpec


class Gathering:
    def __init__(self, spec: RunSpec, last: Stage):
        self.subspace, self.stage = spec.subspace, last
        self.covariance: grassmann.GradientCovariance | None = None  # only while gradients are gathered

    def begin(self, step: int) -> None:
        """Call before the first microbatch of a step."""
        self.stage.on_release = None
        if steps.gathers(self.subspace, step):
            if self.covariance is None:
                self.covariance = self._new()
            self.stage.on_release = self.covariance.add

    def _new(self) -> grassmann.GradientCovariance:
        return grassmann.GradientCovariance(self.stage.shape.width, self.stage.release_device)

    def end(self) -> None:
        """Call after the last microbatch of a step."""
        self.stage.on_release = None

    def decide(self, applied: bool) -> None:
        if self.covariance is not None and applied:
            self.covariance.commit()
        elif self.covariance is not None:
            self.covariance.discard()

    def state(self) -> dict[str, Tensor]:
        """The gradients gathered so far for the next basis."""
        return {} if self.covariance is None else {"total": self.covariance.total}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.covariance = None
        if "total" in state:
            self.covariance = self._new()
            self.covariance.total.copy_(state["total"])

    def report(self, step: int) -> tuple[dict[str, Any], Basis | None] | None:
        """At the end of a gathering: its quantities for the metrics and, where U moves, the basis that comes next."""
        assert self.covariance is not None
        basis = self.stage.basis
        assert basis is not None
        a, self.covariance = self.covariance.total.cpu(), None
        if not float(a.trace()) > 0:  # every step of the window was skipped
            return None
        basis, update = basis.copy_to("cpu"), self.subspace.update
        if not update.interval:
            return {"version": basis.version, **grassmann.report(basis, basis, a)}, None
        new = grassmann.moved(basis, a, update.step_size, update.inner_steps)
        first_step = steps.first_step_with(update, step)
        return {"first_step": first_step, "version": new.version, **grassmann.report(basis, new, a)}, new
