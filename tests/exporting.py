"""Runs to export, made in this process: the reference's run directories, and what a coordinator would have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from conftest import make_reference
from safetensors.torch import save_file

from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.run_dir import open_run_dir, run_of
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.data.kept import keep
from protomodels_cli.files import hash_file
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.snapshot import write_snapshot


def save_reference(run_dir: Path, steps: int = 3, **sections: Any) -> Reference:
    """As `pmtrain reference` leaves it, with a snapshot after every step."""
    r = make_reference(**sections)
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text(yaml.safe_dump(r.spec.model_dump(mode="json")))
    keep(r.corpus, run_dir)
    for _ in range(steps):
        r.run_step()
        write_snapshot(run_dir / "snapshots", r.step, r.trainers, r.carry, keep=2)
    return r


def save_run(run_dir: Path, steps: int = 2, **sections: Any) -> Reference:
    """As a coordinator leaves it, without its journal."""
    r = make_reference(**sections)
    opened = open_run_dir(run_dir, r.spec, Path())
    opened.lock.close()
    keep(r.corpus, run_dir)
    for _ in range(steps):
        r.run_step()
        save_snapshot(run_dir, r, 1)
    return r


def save_snapshot(run_dir: Path, r: Reference, lineage: int) -> Path:
    """Complete, of what the reference is now."""
    folder = run_dir / "snapshots" / manifest.folder_name(lineage, r.step)
    folder.mkdir(parents=True)
    for i, trainer in enumerate(r.trainers):
        save_file(trainer.state(r.carry.state(i)), folder / manifest.part_name(i))
    hashes = tuple(hash_file(folder / manifest.part_name(i)) for i in range(len(r.trainers)))
    layers = tuple(len(stage.slice.layers) for stage in r.stages)
    mark = Mark(lineage, r.step, 0, "", parts=hashes, layers=layers, eval_loss=4.25)
    _, identity = run_of(run_dir)
    manifest.write(folder, identity, mark, (0, ""), run_dir / "basis")
    return folder


def logits_of(r: Reference, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return r.stages[-1].logits(r.forward(ids, 1, 0)[-1].output)
