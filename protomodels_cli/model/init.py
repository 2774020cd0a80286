"""Initial weights: each matrix from a generator of its own, named after it, so that the cut changes nothing; or from a
checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from protomodels_cli import counter
from protomodels_cli.huggingface.checkpoint import Checkpoint
from protomodels_cli.model.anchor import Anchor, Taps
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer, is_early, is_in_head
from protomodels_cli.spec.groups import writer_std
from protomodels_cli.spec.schema import RunSpec


@torch.no_grad()
def initialise(modules: nn.Module, spec: RunSpec) -> None:
    """Fill every weight below `modules`, whose names are those of the whole model (`layers.7.attn.o`)."""
    groups, seed = spec.groups, spec.seed
    for name, module in modules.named_modules():
        if isinstance(module, Matrix):
            std = groups.head.std if is_in_head(name) else groups.matrices.std
            if is_early(name):  # at random it would lead its segment astray before it has learnt anything
                std = 0.0
            module.weight.copy_(_draw(name, tuple(module.weight.shape), std, seed))
        elif isinstance(module, Writer):
            std = groups.embedding.std if name == "embed" else writer_std(spec)
            rows, columns = module.weight.shape
            draw = partial(_draw_rows, name, rows, std, seed)
            module.weight.copy_(module.form.initial(draw, columns))
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Anchor | Taps):
            module.weight.zero_()


@torch.no_grad()
def load_checkpoint(stages: Iterable[nn.Module], checkpoint: Checkpoint) -> None:
    """Fill every weight of these stages with the checkpoint's."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.copy_(torch.from_numpy(checkpoint.array(name.removesuffix(".weight"))))


def _draw_rows(name: str, rows: int, std: float, seed: int, columns: int) -> Tensor:
    return _draw(name, (rows, columns), std, seed)


def _draw(name: str, size: tuple[int, ...], std: float, seed: int) -> Tensor:
    if std == 0:
        return torch.zeros(size, dtype=torch.float32)
    generator = torch.Generator().manual_seed(counter.subseed(seed, "weights", name) >> 1)
    return torch.randn(size, generator=generator, dtype=torch.float32).mul_(std)
