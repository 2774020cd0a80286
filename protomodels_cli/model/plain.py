"""The weights of an exported model from a stage's, under Hugging Face's names, one tensor at a time.

Of a plain Llama (Qwen3 with qk-norm): coordinates are multiplied out, and the embedding is E·Uᵀ + T_fixed, written for
the first and only time as floats; with a single segment its anchor's change is part of it. Where several segments have
anchors or streams of their own: an anchor is T_fixed + its change, and what writes to two streams keeps its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from protomodels_cli.huggingface.names import hugging_face_name
from protomodels_cli.model.anchor import Anchor, Taps
from protomodels_cli.model.llama import Matrix, RMSNorm, StageModules, Table, Writer, is_early
from protomodels_cli.model.stage import Stage
from protomodels_cli.model.t_fixed import TFixed

ROWS = 1024  # of T_fixed that are floats at one time

Stored = Callable[[str], Tensor]  # a parameter by the name that it has in the model
Made = tuple[str, tuple[int, ...], Callable[[], Tensor]]  # Hugging Face's name, shape and maker of a weight


def multiplied_out(stages: list[Stage]) -> dict[str, Tensor]:
    """All weights of a model that is in memory."""
    out: dict[str, Tensor] = {}
    for stage in stages:
        made = exported_weights(stage, stage.t_fixed, partial(_copy, dict(stage.named_parameters())))
        out |= {name: make() for name, _, make in made}
    return out


def _copy(parameters: dict[str, Parameter], name: str) -> Tensor:
    return parameters[name].detach().clone()


def exported_weights(modules: StageModules, t_fixed: TFixed | None, stored: Stored) -> Iterator[Made]:
    """A stage's, in layer order. A maker may use what `stored` gives it."""
    is_plain = len(modules.shape.segment_starts) < 2
    for name, module in modules.named_modules():
        read = partial(stored, f"{name}.weight")
        if isinstance(module, Table):
            yield from (_plain_embedding if is_plain else _embedding)(modules, module, t_fixed, stored)
        elif isinstance(module, Writer):
            inputs, columns = module.weight.shape
            written = columns if module.form.has_local_stream else modules.shape.width
            yield hugging_face_name(name), (written, inputs), partial(_written, module, read)
        elif isinstance(module, Anchor) and not is_plain:
            shape = len(module.weight), modules.shape.width
            yield hugging_face_name(name), shape, partial(_anchor, module, t_fixed, read)
        elif isinstance(module, Matrix | RMSNorm | Taps) and not is_early(name):
            yield hugging_face_name(name), tuple(module.weight.shape), read


def _plain_embedding(modules: StageModules, table: Table, t_fixed: TFixed | None, stored: Stored) -> Iterator[Made]:
    @torch.no_grad()
    def make() -> Tensor:
        rows = table.form.rows(stored("embed.weight"))
        if modules.shape.trains_anchors:
            first: Any = modules.layers["0"]
            rows += first.anchor.lifted(stored("layers.0.anchor.weight"))
        return _with_t_fixed(rows, t_fixed)

    yield hugging_face_name("embed"), (modules.shape.vocab_size, modules.shape.width), make


def _embedding(modules: StageModules, table: Table, t_fixed: TFixed | None, stored: Stored) -> Iterator[Made]:
    """And what all segments have in common."""
    vocab_size, width = modules.shape.vocab_size, modules.shape.width
    read = partial(stored, "embed.weight")
    if not table.form.has_local_stream:
        yield hugging_face_name("embed"), (vocab_size, width), lambda: table.form.rows(read())
        return
    yield hugging_face_name("embed"), tuple(table.weight.shape), read
    yield hugging_face_name("basis"), tuple(table.form.u.shape), lambda: table.form.u
    if not modules.shape.trains_anchors:
        make = partial(_fixed_anchor, t_fixed, modules.shape.dtype)
        yield hugging_face_name("layers.0.anchor"), (vocab_size, width), make


@torch.no_grad()
def _written(module: Writer, read: Callable[[], Tensor]) -> Tensor:
    return (read() if module.form.has_local_stream else module.form.rows(read())).T.contiguous()


@torch.no_grad()
def _anchor(module: Anchor, t_fixed: TFixed | None, read: Callable[[], Tensor]) -> Tensor:
    return _with_t_fixed(module.lifted(read()), t_fixed)


def _fixed_anchor(t_fixed: TFixed | None, dtype: torch.dtype) -> Tensor:
    assert t_fixed is not None
    zeros = torch.zeros(t_fixed.vocab_size, t_fixed.width, dtype=dtype, device=t_fixed.signs.device)
    return _with_t_fixed(zeros, t_fixed)


@torch.no_grad()
def _with_t_fixed(rows: Tensor, t_fixed: TFixed | None) -> Tensor:
    """In place and in pieces: the table is large."""
    if t_fixed is not None:
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            some += t_fixed.rows(torch.arange(start, start + len(some), device=rows.device), rows.dtype)
    return rows
