"""A part from this disk as tensors, once it is known to be what its stage is built from."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from protomodels_cli.cost.part import flaw_of_numbers, has_applied, part_contents
from protomodels_cli.safetensors_file import SafetensorsError, SafetensorsFile
from protomodels_cli.spec.schema import RunSpec


class UnusablePart(Exception):
    """No stage of this run can be built from it, though its bytes are those that were saved; or it was deleted since,
    as its snapshot was given up. The coordinator, which can check the same, decides what follows."""


def load_part(path: Path, spec: RunSpec, layers: range, step: int) -> dict[str, Tensor]:
    """The part of the stage with these layers after this step. `spec` has the run's own cut."""
    try:
        with SafetensorsFile(path) as part:
            contents = part_contents(spec, layers, step, has_applied(part))
            flaw = contents.flaw_in(part.tensors) or flaw_of_numbers(part)
        if flaw is not None:
            raise UnusablePart(f"{flaw.tensor} is {flaw.found or 'missing'}")
        return load_file(path)
    except SafetensorsError as e:
        raise UnusablePart(str(e)) from None
    except OSError as e:
        raise UnusablePart(e.strerror or str(e)) from None
