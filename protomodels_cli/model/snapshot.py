"""Weights and their hash; snapshots of all stages on disk, as safetensors.

A snapshot has each stage's weights, optimizer state and basis, and what its codecs remember. A basis that waits for its
step and gradients gathered for the next one are the run's, not a stage's, and are not in it: nothing resumes from a
snapshot yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from protomodels_cli.errors import UserError
from protomodels_cli.files import sync_folder
from protomodels_cli.model.optim import StageOptimizer
from protomodels_cli.model.stage import Carry, Stage


def weights(stages: list[Stage]) -> dict[str, Tensor]:
    """All parameters of the model under their names, in layer order whatever the cut."""
    return {name: p.detach() for stage in stages for name, p in stage.named_parameters()}


def parameter_hashes(stage: Stage) -> list[tuple[str, str]]:
    """Name and hash of each of a stage's parameters, in layer order."""
    found = []
    for name, p in stage.named_parameters():
        digest = hashlib.sha256(f"{p.dtype} {tuple(p.shape)}\n".encode())
        digest.update(p.detach().cpu().contiguous().numpy().tobytes())
        found.append((name, digest.hexdigest()))
    return found


def weights_sha256(parameters: Iterable[tuple[str, str]]) -> str:
    """One hash over all parameters' hashes in layer order: equal models, equal hash, wherever they are cut.

    A hash of hashes, so that stages on different machines can each contribute theirs."""
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in parameters)
    return hashlib.sha256(lines.encode()).hexdigest()


def stage_state(stage: Stage, optimizer: StageOptimizer, codecs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights, optimizer state and basis of one stage, and what its codecs remember."""
    state = {f"weights/{name}": p.detach() for name, p in stage.named_parameters()}
    for slot in optimizer.slots:
        state |= {f"optimizer/{slot.name}/{key}": tensor for key, tensor in slot.state.items()}
    state["optimizer/applied"] = torch.tensor(optimizer.applied)
    if stage.basis is not None:
        state |= {"basis/u": stage.basis.u, "basis/version": torch.tensor(stage.basis.version)}
    state |= {f"codecs/{name}": tensor for name, tensor in codecs.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}


def write_snapshot(
    folder: Path, step: int, stages: list[Stage], optimizers: list[StageOptimizer], carry: Carry, keep: int
) -> Path:
    """Write folder/STEP/stage-i.safetensors with their hashes; whole or not at all. Drops all but the newest `keep`."""
    final, work = folder / f"{step:08d}", folder / f".{step:08d}.partial"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        hashes = {}
        for stage, optimizer in zip(stages, optimizers, strict=True):
            path = work / f"stage-{stage.part.index}.safetensors"
            save_file(stage_state(stage, optimizer, carry.state(stage.part.index)), path)
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
            "free space there; earlier snapshots are intact",
        ) from None
    for old in sorted(p for p in folder.iterdir() if p.name.isdigit())[:-keep]:
        shutil.rmtree(old)
    return final


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
