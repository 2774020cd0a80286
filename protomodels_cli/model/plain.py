"""The weights of a plain Llama (Qwen3 with qk-norm) from a stage's: coordinates multiplied out, Hugging Face's names.

The embedding is T_fixed + E·Uᵀ, written for the first and only time as floats. One tensor is made at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from protomodels_cli.huggingface.names import hugging_face_name
from protomodels_cli.model.llama import Matrix, RMSNorm, StageModules, Writer
from protomodels_cli.model.stage import Stage
from protomodels_cli.model.t_fixed import TFixed

ROWS = 1024  # of T_fixed that are floats at one time

Stored = Callable[[str], Tensor]  # a parameter by the name that it has in the model


def multiplied_out(stages: list[Stage]) -> dict[str, Tensor]:
    """All weights of a model that is in memory."""
    out: dict[str, Tensor] = {}
    for stage in stages:
        made = plain_weights(stage, stage.t_fixed, partial(_copy, dict(stage.named_parameters())))
        out |= {name: make() for name, _, make in made}
    return out


def _copy(parameters: dict[str, Parameter], name: str) -> Tensor:
    return parameters[name].detach().clone()


def plain_weights(
    modules: StageModules, t_fixed: TFixed | None, stored: Stored
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    """Name, shape and maker of each of a stage's weights, in layer order. A maker may use what `stored` gives it."""
    for name, module in modules.named_modules():
        if isinstance(module, Writer):
            rows = module.weight.shape[0]
            if name == "embed":
                shape = rows, modules.shape.width
                yield hugging_face_name(name), shape, partial(_embedding, module, t_fixed, stored, f"{name}.weight")
            else:
                shape = modules.shape.width, rows
                yield hugging_face_name(name), shape, partial(_written, module, stored, f"{name}.weight")
        elif isinstance(module, Matrix | RMSNorm):
            yield hugging_face_name(name), tuple(module.weight.shape), partial(stored, f"{name}.weight")


@torch.no_grad()
def _embedding(module: Writer, t_fixed: TFixed | None, stored: Stored, name: str) -> Tensor:
    rows = module.form.rows(stored(name))
    if t_fixed is not None:
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            some += t_fixed.rows(torch.arange(start, start + len(some), device=rows.device), rows.dtype)
    return rows


@torch.no_grad()
def _written(module: Writer, stored: Stored, name: str) -> Tensor:
    return module.form.rows(stored(name)).T.contiguous()
