"""What tests of a stage's snapshots on CUDA share."""

from __future__ import annotations

from typing import Any

import torch
from waiting import wait_for

from protomodels_cli.model.trainer import StageTrainer
from protomodels_cli.worker.transfers import CudaTransfers


def take_step(trainer: StageTrainer, transfers: CudaTransfers, step: int) -> None:
    """Of a first stage, on zeros, while something of it may still be on its way to the host."""
    tokens = torch.zeros((2, trainer.spec.model.context), dtype=torch.int64, device=trainer.stage.device)
    flight = trainer.stage.run_forward(tokens, None)
    trainer.stage.run_backward(flight, torch.ones_like(flight.output))
    trainer.prepare()
    transfers.before_change()
    trainer.decide(step, apply=True, lr=0.1, clip=1.0)


def pin(trainer: StageTrainer, transfers: CudaTransfers) -> None:
    """Make room for the trainer's state in pinned memory, and wait until it is there."""
    transfers.expect(lambda: trainer.state({}))

    def buffer() -> Any:
        return transfers._buffer

    wait_for(lambda: buffer()._memory is not None, "no memory was pinned")
