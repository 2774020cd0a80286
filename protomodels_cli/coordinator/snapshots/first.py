"""A run's first snapshot, cut from the checkpoint that it starts from. No torch; all of it blocks: call it in a thread.

A part is what a stage would have uploaded after no step: its weights, with anchors that are not changed yet, and an
optimizer that has done nothing yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.cost.part import APPLIED
from protomodels_cli.files import hash_file, put_in_place
from protomodels_cli.huggingface.checkpoint import Checkpoint
from protomodels_cli.huggingface.names import modules
from protomodels_cli.safetensors_file import DTYPES, bytes_of, write_safetensors
from protomodels_cli.spec.cut import anchored_layers, spans
from protomodels_cli.spec.schema import RunSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class Cut:
    parts: tuple[str, ...]  # hashes
    source: str  # hash of the checkpoint
    tied: bool


class FirstSnapshot:
    def __init__(self, spec: RunSpec, checkpoint: Path, snapshots: Snapshots):
        self._spec, self.checkpoint, self._snapshots = spec, checkpoint, snapshots

    def check(self) -> None:
        """Raises UserError where the run cannot start from the checkpoint, as far as headers of files tell."""
        Checkpoint(self.checkpoint, self._spec).close()

    def cut(self, layers: tuple[int, ...]) -> Cut:
        """Write all parts, or none: UserError where the checkpoint cannot be read, OSError where a part cannot be
        written."""
        folder = self._snapshots.begin_anew(0, 0)
        try:
            with Checkpoint(self.checkpoint, self._spec) as checkpoint:
                source = checkpoint.sha256()
                parts = tuple(self._part(checkpoint, folder, stage, span) for stage, span in enumerate(spans(layers)))
                return Cut(parts, source, checkpoint.tied)
        except BaseException:
            self._snapshots.drop(0, 0)
            raise

    def _part(self, checkpoint: Checkpoint, folder: Path, stage: int, span: range) -> str:
        work = folder / f"stage-{stage}.cut"
        self._write(checkpoint, span, work)
        sha256 = hash_file(work)
        put_in_place(work, folder / f"stage-{stage}.{sha256}.safetensors")
        return sha256

    def write_part(self, layers: tuple[int, ...], stage: int, to: Path) -> None:
        """One part once more. Raises as `cut` does."""
        with Checkpoint(self.checkpoint, self._spec) as checkpoint:
            self._write(checkpoint, spans(layers)[stage], to)

    def _write(self, checkpoint: Checkpoint, span: range, path: Path) -> None:
        m, dtype = self._spec.model, DTYPES[self._spec.compute.stored]
        weights = {f"weights/{module}.weight": module for module in modules(span, m.layers, m.qk_norm)}
        sizes = {"anchor.weight": (self._spec.vocab_size, self._spec.anchor_width)}
        if self._spec.anchor_tokens > 1:
            sizes["anchor.taps.weight"] = (self._spec.anchor_tokens - 1, m.width)
        anchored = [i for i in span if i in anchored_layers(self._spec)]
        changes = {f"weights/layers.{i}.{name}": shape for i in anchored for name, shape in sizes.items()}
        number = bytes_of(self._spec.compute.stored)
        zeros = {APPLIED: 8} | {name: math.prod(shape) * number for name, shape in changes.items()}

        def data(name: str) -> Buffer:
            return bytes(zeros[name]) if name in zeros else checkpoint.array(weights[name]).data

        described = [(name, dtype, checkpoint.shape(module)) for name, module in weights.items()]
        described += [(name, dtype, shape) for name, shape in changes.items()]
        write_safetensors(path, [(APPLIED, "I64", ()), *described], data)
