"""The weights of a Hugging Face checkpoint, under our names and as our modules store them. Needs numpy, no torch.

Knows files and arrays; what becomes of them (a run's first snapshot, the reference's stages) is the caller's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from protomodels_cli.errors import UserError
from protomodels_cli.huggingface.architecture import architecture_of
from protomodels_cli.huggingface.names import is_transposed
from protomodels_cli.huggingface.weights import Weights
from protomodels_cli.lazy import lazy_import
from protomodels_cli.spec.checkpoint import CONFIG, CheckpointError, read_shape
from protomodels_cli.spec.schema import RunSpec

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")


class Checkpoint:
    """Opened for reading, its files held open; closes with its `with` block. Raises UserError."""

    def __init__(self, folder: Path, spec: RunSpec):
        """`spec`: resolved. What the checkpoint has must be what the spec says."""
        self.folder, self._spec = folder, spec
        self.tied = self._check_config()
        self._architecture = replace(architecture_of(spec), tied=self.tied, segments=None)
        self._weights = Weights(folder, self._architecture)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._weights.close()

    @property
    def modules(self) -> list[str]:
        return self._architecture.modules

    def shape(self, module: str) -> tuple[int, ...]:
        """Of its weight, as our module stores it."""
        shape = self._architecture.shape(module)
        return shape[::-1] if is_transposed(module) else shape

    def array(self, module: str) -> np.ndarray[Any, Any]:
        """Its weight, as our module stores it, in the run's dtype."""
        found = self._weights.array(self._architecture.name(module))
        return np.ascontiguousarray(found.T if is_transposed(module) else found, dtype=self._spec.compute.stored)

    def sha256(self) -> str:
        return self._weights.sha256()

    def _check_config(self) -> bool:
        """Whether the head is tied to the embedding."""
        try:
            shape = read_shape(self.folder)
        except CheckpointError as e:
            raise UserError(f"cannot start from {self.folder}: {e.rule}", e.fix, "checkpoint") from None
        spec = {**self._spec.model.model_dump(), "vocab_size": self._spec.vocab_size}
        for name, value in {**shape.model, "vocab_size": shape.vocab_size}.items():
            if spec[name] != value:
                raise UserError(
                    f"the checkpoint in {self.folder} is not the one that the run began with: {CONFIG} gives {name} = "
                    f"{value}, and the run has {spec[name]}",
                    "put the checkpoint of then there",
                    "checkpoint_changed",
                )
        return shape.tied
