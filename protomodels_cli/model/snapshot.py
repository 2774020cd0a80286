"""Weights and their hash; snapshots of all stages on disk, as safetensors.

A snapshot has each stage's weights, optimizer state and basis, what its codecs remember, and on the last stage the
gradients gathered for the next basis. One that waits for its step is the run's, not a stage's, and is in the journal.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from protomodels_cli.errors import UserError
from protomodels_cli.files import hash_file, sync_folder
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.optim import StageOptimizer
from protomodels_cli.model.stage import Carry, Stage
from protomodels_cli.protocol.hashes import parameter_sha256

if TYPE_CHECKING:
    from protomodels_cli.model.trainer import StageTrainer


def weights(stages: list[Stage]) -> dict[str, Tensor]:
    """All parameters of the model under their names, in layer order whatever the cut."""
    return {name: p.detach() for stage in stages for name, p in stage.named_parameters()}


def parameter_hashes(stage: Stage) -> list[tuple[str, str]]:
    """Name and hash of each of a stage's parameters, in layer order."""
    found = []
    for name, p in stage.named_parameters():
        content = p.detach().cpu().contiguous().numpy()
        found.append((name, parameter_sha256(content.dtype.name, content.shape, content.tobytes())))
    return found


def stage_state(
    stage: Stage, optimizer: StageOptimizer, codecs: Mapping[str, Tensor], gathered: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All that a stage is, on the host, in memory of its own."""
    state = {f"weights/{name}": p.detach() for name, p in stage.named_parameters()}
    for slot in optimizer.slots:
        state |= {f"optimizer/{slot.name}/{key}": tensor for key, tensor in slot.state.items()}
    state["optimizer/applied"] = torch.tensor(optimizer.applied)
    if stage.basis is not None:
        state |= {"basis/u": stage.basis.u, "basis/version": torch.tensor(stage.basis.version)}
    state |= {f"codecs/{name}": tensor for name, tensor in codecs.items()}
    state |= {f"gathered/{name}": tensor for name, tensor in gathered.items()}
    return {name: _on_host(tensor.detach()) for name, tensor in state.items()}


def _on_host(tensor: Tensor) -> Tensor:
    own = torch.empty(tensor.shape, dtype=tensor.dtype)
    return own.copy_(tensor)


def part_of(state: Mapping[str, Tensor], section: str) -> dict[str, Tensor]:
    """`codecs`, say: the tensors of one section under their own names."""
    return {name.removeprefix(f"{section}/"): t for name, t in state.items() if name.startswith(f"{section}/")}


def basis_in(state: Mapping[str, Tensor]) -> Basis | None:
    return Basis(int(state["basis/version"]), state["basis/u"]) if "basis/u" in state else None


@torch.no_grad()
def load_stage_state(stage: Stage, optimizer: StageOptimizer, state: Mapping[str, Tensor]) -> None:
    """Weights and optimizer state; the stage was built with the basis."""
    for name, parameter in stage.named_parameters():
        parameter.copy_(state[f"weights/{name}"])
    for slot in optimizer.slots:
        slot.state = {key: t.to(stage.device) for key, t in part_of(state, f"optimizer/{slot.name}").items()}
    optimizer.applied = int(state["optimizer/applied"])


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
            save_file(trainer.state(carry.state(i)), path)
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
    return hash_file(path)
