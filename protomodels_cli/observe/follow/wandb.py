"""Metrics as a run of Weights & Biases. A row's number is its step there, so that a row that comes again is dropped;
charts are drawn over the training step. Needs the package wandb."""

from __future__ import annotations

from pathlib import Path

import wandb

from protomodels_cli.observe.follow.following import Points, Position, load, save


class WeightsAndBiases:
    """`run` is the same for every start, and so the run there is one. What was sent is known there; with
    WANDB_MODE=offline, from a file beside what `wandb sync` sends later."""

    def __init__(self, project: str, name: str, run: str, folder: Path):
        self._project, self._name, self._run = project, name, run
        self._folder = folder
        self._state = folder / "wandb" / f"pmtrain-{run}.json"

    def begin(self) -> Position:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        known = load(self._state, self._run) or {"rows": 0, "offset": 0}
        self._there = wandb.init(
            project=self._project, name=self._name, id=self._run, resume="allow", dir=str(self._folder)
        )
        self._there.define_metric("training step")
        self._there.define_metric("*", step_metric="training step")
        if self._there.offline or self._there.step == known["rows"] + 1:
            return Position(known["rows"], known["offset"])
        return Position(max(0, self._there.step - 1))  # the next that it expects

    def write(self, points: Points) -> None:
        values = {**points.values, "training step": points.step, "lineage": points.lineage}
        self._there.log(values, step=points.row)

    def commit(self, position: Position) -> None:
        save(self._state, self._run, position)

    def close(self) -> None:
        self._there.finish()
