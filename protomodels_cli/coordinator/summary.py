"""A finished run in figures: what it took, what it sent, what came out. Written as summary.json."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protomodels_cli.coordinator.history import History
from protomodels_cli.files import write_whole
from protomodels_cli.observe.metrics import JsonLines, first_step, last_step, strict
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.usage import Usage, by_stage


class Totals:
    """What this process saw of the run: times from the first grant to the last decision, and sums over step rows."""

    def __init__(self) -> None:
        self.began: float | None = None  # when the run's first step was granted
        self.decided = 0.0  # when the last one was decided
        self._cpu_s: tuple[float, float] | None = None  # of this process, at the first grant and at the last decision
        self._most_in_flight: list[int] = []
        self._last: list[Usage] = []

    def saw_grant(self) -> None:
        """A step was granted: the first since this process began counts."""
        if self._cpu_s is None:
            self._cpu_s = time.process_time(), time.process_time()
            self.began = self.began or time.time()

    def saw_decision(self) -> None:
        self.decided, cpu = time.time(), time.process_time()
        self._cpu_s = (self._cpu_s or (cpu, cpu))[0], cpu

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a step's row of metrics into the sums."""
        self._last = [Usage(**stage) for stage in by_stage(row["stages"])]
        before = self._most_in_flight or [0] * len(self._last)
        self._most_in_flight = [max(b, s.most_in_flight) for b, s in zip(before, self._last, strict=True)]

    def write(self, path: Path, history: History, spec: RunSpec, relayed: Sequence[Mapping[str, int]]) -> None:
        assert history.ended is not None
        seconds = self.decided - (self.began or self.decided)
        cpu_before, cpu = self._cpu_s or (0.0, 0.0)  # none, if all that was left was to finish
        tokens = history.step * spec.batch.size * spec.model.context
        summary = {
            "steps": history.step,
            "stages": len(history.layers),
            "seconds": seconds,
            "loss_first": history.loss_first,
            "loss_last": history.decision.loss if history.decision else None,
            "eval_loss": history.eval_loss,
            "tokens_per_s": tokens / seconds if seconds else 0.0,
            **bytes_summary(history, spec),
            "weights_sha256": history.ended.weights_sha256,
            "layers_per_stage": list(history.layers),
            "cpu_seconds": {"coordinator": cpu - cpu_before, "stages": [used.cpu_s for used in self._last]},
            "relayed_bytes": list(relayed),
            "peak_memory_bytes": [used.peak_memory for used in self._last],
            "forecast_memory_bytes": [used.forecast_memory for used in self._last],
            "reserved_memory_bytes": [used.reserved_memory for used in self._last],
            "most_in_flight": self._most_in_flight,
            "steps_redone": history.redone,
            "lineage": history.lineage,
            "generations": history.generation,
            "spec_sha256": spec.sha256(),
            "checkpoint_sha256": history.snapshots[0].source or None,
            "run_dir": str(path.parent),
        }
        write_whole(path, json.dumps(strict(summary), indent=1).encode() + b"\n")


def mend_metrics(path: Path, metrics: JsonLines, history: History, spec: RunSpec) -> float | None:
    """The journal may be one decision ahead of the metrics: that row is added, without what only the stages knew.
    Returns when the run's first step was granted."""
    d, last = history.decision, last_step(path)
    if d is not None and (last is None or (last["lineage"], last["step"]) != (history.lineage, d.step)):
        row = {"event": "step", "lineage": history.lineage, "step": d.step, "loss": d.loss, "lr": d.lr}
        tokens = spec.batch.size * spec.model.context
        metrics.write(row | {"grad_norm": d.norm, "applied": d.apply, "tokens": tokens, "seconds": None})
    return began(path)


def began(metrics: Path) -> float | None:
    """When the run's first step was granted, seconds since 1970."""
    try:
        first = first_step(metrics)
    except FileNotFoundError:
        return None
    return None if first is None else first["at"] - (first["seconds"] or 0.0)


def bytes_summary(history: History, spec: RunSpec) -> dict[str, Any]:
    """Bytes a token over a boundary, each way, against a dense pipeline's. Headers count, evaluations do not, and of
    steps that were redone the last time counts."""
    crossings = history.step * spec.batch.size * spec.model.context * (len(history.layers) - 1)
    forward, backward = (b / crossings if crossings else 0.0 for b in (history.forward_bytes, history.backward_bytes))
    dense = 2.0 * spec.model.width
    ratio = 2 * dense / (forward + backward) if crossings else None
    return {
        "bytes_per_token": {"forward": forward, "backward": backward},
        "dense_bytes_per_token_bf16": dense,
        "ratio_bf16": ratio,
        "ratio_fp32": None if ratio is None else 2 * ratio,
        "bytes_sent": history.forward_bytes + history.backward_bytes,
        "dense_bytes_bf16": int(2 * dense * crossings),
    }
