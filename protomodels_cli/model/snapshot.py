"""The reference's snapshots: all stages on disk, as safetensors with their hashes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from protomodels_cli.errors import UserError
from protomodels_cli.files import hash_file, sync_folder
from protomodels_cli.model.stage import Carry
from protomodels_cli.model.state import on_host
from protomodels_cli.model.trainer import StageTrainer


def write_snapshot(
    folder: Path,
    step: int,
    trainers: list[StageTrainer],
    carry: Carry,
    keep: int,
) -> Path:
    """Write folder/STEP/stage-i.safetensors with their hashes; whole or not at all. Drops all but the newest `keep`."""
    final, work = folder / f"{step:08d}", folder / f".{step:08d}.partial"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        hashes = {}
        for i, trainer in enumerate(trainers):
            path = work / f"stage-{i}.safetensors"
            save_file(on_host(trainer.state(carry.state(i))), path)
            hashes[path.name] = _sync_and_hash(path)
        (work / "hashes.json").write_text(json.dumps({"step": step, "sha256": hashes}, indent=1))
        _sync_and_hash(work / "hashes.json")
        os.rename(work, final)
        sync_folder(folder)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(work, ignore_errors=True)
        reason = getattr(e, "strerror", None) or str(e)
        raise UserError(
            f"the snapshot of step {step} cannot be written to {folder}: {reason}",
            "free space there, and start again; earlier snapshots are intact",
            "snapshot_unwritable",
        ) from None
    for old in sorted(p for p in folder.iterdir() if p.name.isdigit())[:-keep]:
        shutil.rmtree(old)
    return final


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return hash_file(path)
