"""All that a stage is, as named tensors: what a snapshot's part holds, and what hashes are made of. Knows no files.

Weights, optimizer state and basis, what its codecs remember, and on the last stage the gradients gathered for the next
basis. A basis that waits for its step is the run's, not a stage's, and is in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protomodels_cli.model.basis import Basis
from protomodels_cli.model.optim import StageOptimizer
from protomodels_cli.model.stage import Stage
from protomodels_cli.protocol.hashes import parameter_sha256


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
    """The stage's whole state: the tensors themselves, which the next step changes."""
    state = {f"weights/{name}": p.detach() for name, p in stage.named_parameters()}
    for trained in optimizer.parameters:
        state |= {f"optimizer/{trained.name}/{key}": tensor for key, tensor in trained.state.items()}
    state["optimizer/applied"] = torch.tensor(optimizer.applied)
    if stage.basis is not None:
        state |= {"basis/u": stage.basis.u, "basis/version": torch.tensor(stage.basis.version)}
    state |= {f"codecs/{name}": tensor for name, tensor in codecs.items()}
    state |= {f"gathered/{name}": tensor for name, tensor in gathered.items()}
    return {name: tensor.detach() for name, tensor in state.items()}


def on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in this machine's memory."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t) for name, t in state.items()}


def section_of(state: Mapping[str, Tensor], section: str) -> dict[str, Tensor]:
    """`codecs`, say: the tensors of one section under their own names."""
    return {name.removeprefix(f"{section}/"): t for name, t in state.items() if name.startswith(f"{section}/")}


def basis_in(state: Mapping[str, Tensor]) -> Basis | None:
    return Basis(int(state["basis/version"]), state["basis/u"]) if "basis/u" in state else None


@torch.no_grad()
def load_stage_state(stage: Stage, optimizer: StageOptimizer, state: Mapping[str, Tensor]) -> None:
    """Weights and optimizer state; the stage was built with the basis."""
    for name, parameter in stage.named_parameters():
        parameter.copy_(state[f"weights/{name}"])
    for trained in optimizer.parameters:
        there = trained.parameter.device
        trained.state = {key: t.to(there) for key, t in section_of(state, f"optimizer/{trained.name}").items()}
    optimizer.applied = int(state["optimizer/applied"])
    stage.refresh()
