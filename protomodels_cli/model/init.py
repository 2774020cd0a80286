"""Initial weights: each matrix from a generator of its own, named after it, so that the cut changes nothing; or from a
checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from protomodels_cli import counter
from protomodels_cli.huggingface.checkpoint import Checkpoint
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer
from protomodels_cli.model.shape import Shape


@torch.no_grad()
def initialise(modules: nn.Module, shape: Shape, seed: int) -> None:
    """Fill every weight below `modules`, whose names are those of the whole model (`layers.7.attn.o`)."""
    for name, module in modules.named_modules():
        if isinstance(module, Matrix):
            module.weight.copy_(_draw(name, tuple(module.weight.shape), shape.init_std, seed))
        elif isinstance(module, Writer):
            std = shape.embedding_std if name == "embed" else shape.init_std / math.sqrt(2 * shape.layers)
            rows, columns = module.weight.shape
            draw = partial(_draw_rows, name, rows, std, seed)
            module.weight.copy_(module.form.initial(draw, columns))
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)


@torch.no_grad()
def load_checkpoint(stages: Iterable[nn.Module], checkpoint: Checkpoint) -> None:
    """Fill every weight of these stages with the checkpoint's."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.copy_(torch.from_numpy(checkpoint.array(name.removesuffix(".weight"))))


def _draw_rows(name: str, rows: int, std: float, seed: int, columns: int) -> Tensor:
    return _draw(name, (rows, columns), std, seed)


def _draw(name: str, size: tuple[int, ...], std: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(counter.subseed(seed, "weights", name) >> 1)
    return torch.randn(size, generator=generator, dtype=torch.float32).mul_(std)
