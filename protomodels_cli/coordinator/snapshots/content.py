"""Whether a part that lies here is what its stage saves: by its header, and where that is asked for by its numbers.

Reads files, piece by piece; call it in a thread. Knows no torch: what a part must hold is cost/part.py's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.snapshots.failures import NoTensors, Unfit, WrongTensor
from protomodels_cli.cost.part import Flaw, PartContents, flaw_of_numbers, part_contents
from protomodels_cli.safetensors_file import SafetensorsError, SafetensorsFile, header_of
from protomodels_cli.spec.cut import spans
from protomodels_cli.spec.schema import RunSpec

ROOM_FOR_NAMES = 1 << 20  # beside the numbers of a part
LONGEST_HEADER = 8 + ROOM_FOR_NAMES
MOST_TEXT = 200  # characters of what a peer has written


def unfit(
    part: Path | BufferedReader, spec: RunSpec, layers: Sequence[int], mark: Mark, stage: int, numbers: bool = False
) -> Unfit | None:
    """What is wrong with it. `mark`: of its snapshot. `numbers`: look at those too. Raises OSError."""
    contents = _contents(spec, layers, mark, stage)
    try:
        with SafetensorsFile(part, ROOM_FOR_NAMES) as file:
            return _described(contents.flaw_in(file.tensors) or (flaw_of_numbers(file) if numbers else None))
    except SafetensorsError as e:
        return NoTensors(_shown(str(e)))


def unfit_by_header(
    beginning: bytes, size: int, spec: RunSpec, layers: Sequence[int], mark: Mark, stage: int
) -> Unfit | None:
    """The same of a part that lies elsewhere, of which this is the beginning: LONGEST_HEADER bytes, if it has them."""
    try:
        tensors, _ = header_of(lambda start, end, _: memoryview(beginning)[start:end], size, ROOM_FOR_NAMES)
    except SafetensorsError as e:
        return NoTensors(_shown(str(e)))
    return _described(_contents(spec, layers, mark, stage).flaw_in(tensors))


def _contents(spec: RunSpec, layers: Sequence[int], mark: Mark, stage: int) -> PartContents:
    own_cut = spec.model_copy(update={"stages": list(layers)})
    applied = mark.step > mark.skipped_in_a_row
    return part_contents(own_cut, spans(layers)[stage], mark.step, applied)


def _described(flaw: Flaw | None) -> WrongTensor | None:
    return None if flaw is None else WrongTensor(_shown(flaw.tensor), flaw.found, flaw.right)


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])
