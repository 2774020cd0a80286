"""A snapshot's weights as those of the exported model, stage by stage and one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from protomodels_cli.errors import UserError
from protomodels_cli.export.source import Source
from protomodels_cli.forms import Form
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.llama import Section, StageModules
from protomodels_cli.model.plain import exported_weights
from protomodels_cli.model.shape import Shape, Slice
from protomodels_cli.model.stage import t_fixed_of
from protomodels_cli.model.t_fixed import TFixed
from protomodels_cli.protocol.hashes import parameter_sha256
from protomodels_cli.safetensors_file import SafetensorsError, SafetensorsFile
from protomodels_cli.spec.cut import spans
from protomodels_cli.spec.schema import RunSpec

Maker = Callable[[], Tensor]


@dataclass(frozen=True)
class Weight:
    name: str  # Hugging Face's
    shape: tuple[int, ...]


def stage_shapes(spec: RunSpec, layers: tuple[int, ...]) -> list[list[Weight]]:
    """What each stage's weights will be, before anything is read."""
    form = _form_without_basis(spec)

    def unread(name: str) -> Tensor:
        raise AssertionError(f"{name} was not to be read")

    return [
        [Weight(name, shape) for name, shape, _ in exported_weights(_modules(spec, slice_, form), None, unread)]
        for slice_ in slices_of(layers)
    ]


def weights(source: Source) -> Iterator[tuple[str, Maker]]:
    """Hugging Face's name and the maker of every weight. A maker is to be called before the next one is asked for."""
    for stage in range(len(source.parts)):
        with stage_weights(source, stage) as makers:
            yield from makers.items()


@contextmanager
def stage_weights(source: Source, stage: int, hashes: dict[str, str] | None = None) -> Iterator[dict[str, Maker]]:
    """A stage's weights by Hugging Face's names. Into `hashes` go the hashes of its parameters, as they are read."""
    spec, slice_ = source.spec, slices_of(source.layers)[stage]
    part = source.parts[stage]
    with part.open() as file:

        def stored(name: str) -> Tensor:
            found = _tensor(file, f"weights/{name}", part.path)
            right = shapes[name]
            if (tuple(found.shape), found.dtype) != right:
                raise _other_model(part.path, f"weights/{name}", found, right)
            if hashes is not None:
                content = found.numpy()
                hashes[name] = parameter_sha256(content.dtype.name, content.shape, content.reshape(-1).data)
            return found

        form = _form(spec, file, part.path)
        modules = _modules(spec, slice_, form)
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in modules.named_parameters()}
        is_added = slice_.is_first or modules.shape.trains_anchors
        t_fixed: TFixed | None = t_fixed_of(spec) if is_added and spec.form.has_basis else None
        yield {name: make for name, _, make in exported_weights(modules, t_fixed, stored)}
        if hashes is not None:
            for name in shapes.keys() - hashes.keys():  # what was there for training alone
                stored(name)
            for name in shapes:
                hashes[name] = hashes.pop(name)  # in the order in which all are hashed


def slices_of(layers: tuple[int, ...]) -> list[Slice]:
    cut = spans(layers)
    return [Slice(i, span.start, span.stop, i == 0, i == len(cut) - 1) for i, span in enumerate(cut)]


def _modules(spec: RunSpec, slice_: Slice, form: Form) -> StageModules:
    """Shapes and forms without memory."""
    return StageModules(Shape.of(spec), slice_, Section(torch.device("meta"), slice_.layers, form))


def _form(spec: RunSpec, file: SafetensorsFile, path: str) -> Form:
    if not spec.form.has_basis:
        return spec.form()
    return spec.form(Basis(int(_tensor(file, "basis/version", path)), _tensor(file, "basis/u", path)))


def _form_without_basis(spec: RunSpec) -> Form:
    if not spec.form.has_basis:
        return spec.form()
    return spec.form(Basis(0, torch.empty(spec.model.width, spec.subspace.k, device="meta")))


def _tensor(file: SafetensorsFile, name: str, path: str) -> Tensor:
    if name not in file.tensors:
        raise _unusable(f"{path} has no tensor {name}")
    try:
        return torch.from_numpy(file.array(name))
    except OSError as e:
        raise _unusable(f"{path} cannot be read: {e.strerror}") from None
    except SafetensorsError as e:
        raise _unusable(f"{path} is damaged: {e}") from None


def _other_model(path: str, name: str, found: Tensor, right: tuple[tuple[int, ...], torch.dtype]) -> UserError:
    shape, dtype = right
    return _unusable(
        f"{path}: {name} is {found.dtype} of shape {tuple(found.shape)}, and the spec makes it {dtype} of {shape}"
    )


def _unusable(what: str) -> UserError:
    return UserError(what, "export another snapshot with --step, or from a copy of the run", "snapshot_damaged")
