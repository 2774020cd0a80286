"""The weights of a Hugging Face checkpoint, under our names and as our modules store them. Needs numpy, no torch.

config.json, and model.safetensors or model.safetensors.index.json with the files that it lists

Knows files and arrays; what becomes of them (a run's first snapshot, the reference's stages) is the caller's.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from protomodels_cli.errors import UserError
from protomodels_cli.files import hash_file
from protomodels_cli.huggingface.files import INDEX, WEIGHTS, BadIndex, NoWeights, weight_files
from protomodels_cli.huggingface.names import hugging_face_name, is_transposed, modules
from protomodels_cli.lazy import lazy_import
from protomodels_cli.safetensors_file import SafetensorsError, SafetensorsFile
from protomodels_cli.spec.checkpoint import CONFIG, OTHER, CheckpointError, read_shape
from protomodels_cli.spec.schema import RunSpec

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

FLOATS = "F64", "F32", "F16", "BF16"
MADE_ANEW = re.compile(r".*\.rotary_emb\.inv_freq")  # older files have it; it follows from rope_theta
_FETCH = "fetch the checkpoint again, all files of it"


class Checkpoint:
    """Opened for reading, its files held open; closes with its `with` block. Raises UserError."""

    def __init__(self, folder: Path, spec: RunSpec):
        """`spec`: resolved. What the checkpoint has must be what the spec says."""
        self.folder, self._spec = folder, spec
        self._opened = contextlib.ExitStack()
        try:
            self.tied = self._check_config()
            self._files = {path: self._open(path) for path in self._list()}
            self._holder = {name: file for file in self._files.values() for name in file.tensors}
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    @property
    def modules(self) -> list[str]:
        m = self._spec.model
        return list(modules(range(m.layers), m.layers, m.qk_norm))

    def shape(self, module: str) -> tuple[int, ...]:
        """Of its weight, as our module stores it."""
        shape = self._shape(module)
        return shape[::-1] if is_transposed(module) else shape

    def array(self, module: str) -> np.ndarray[Any, Any]:
        """Its weight, as our module stores it, in the run's dtype."""
        name = self._name(module)
        file = self._holder[name]
        try:
            found = file.array(name)
        except (SafetensorsError, OSError) as e:
            raise _unreadable(file.path, e) from None
        return np.ascontiguousarray(found.T if is_transposed(module) else found, dtype=self._spec.compute.stored)

    def sha256(self) -> str:
        """Of config.json and all files with weights: the same for a copy of the folder. Reads all of them, the weights
        from the files that are open: what is cut is what is hashed, whatever becomes of their names meanwhile."""
        index = [self.folder / INDEX] if (self.folder / INDEX).exists() else []
        found = hashlib.sha256()
        for path in sorted([self.folder / CONFIG, *index, *self._files]):
            try:
                content = self._files[path].sha256() if path in self._files else hash_file(path)
            except (SafetensorsError, OSError) as e:
                raise _unreadable(path, e) from None
            found.update(f"{path.name} {content}\n".encode())
        return found.hexdigest()

    def _name(self, module: str) -> str:
        return hugging_face_name("embed" if module == "head.out" and self.tied else module)

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

    def _list(self) -> list[Path]:
        """The files with weights."""
        try:
            return weight_files(self.folder)
        except NoWeights:
            what = f"cannot start from {self.folder}: it has neither {WEIGHTS} nor {INDEX}"
            fix = "write the checkpoint as safetensors (save_pretrained of transformers does)"
            raise UserError(what, fix, "checkpoint_no_weights") from None
        except OSError as e:
            raise _unreadable(self.folder / INDEX, e) from None
        except BadIndex:
            what = f"cannot start from {self.folder}: {INDEX} does not say which file has which weights"
            raise UserError(what, _FETCH, "checkpoint_damaged") from None

    def _open(self, path: Path) -> SafetensorsFile:
        try:
            return self._opened.enter_context(SafetensorsFile(path))
        except (SafetensorsError, OSError) as e:
            raise _unreadable(path, e) from None

    def _check_tensors(self) -> None:
        """That all weights are there as the model needs them, and no others."""
        needed = {self._name(module): self._shape(module) for module in self.modules}
        for name, shape in needed.items():
            if name not in self._holder:
                raise UserError(f"cannot start from {self.folder}: there is no {name}", _FETCH, "checkpoint_incomplete")
            found = self._holder[name].tensors[name]
            if found.shape != shape or found.dtype not in FLOATS:
                raise UserError(
                    f"cannot start from {self.folder}: {name} is {found.dtype} of the shape {list(found.shape)}, and "
                    f"floating-point numbers of the shape {list(shape)} belong there",
                    OTHER,
                    "checkpoint_tensor",
                )
        spare = self._holder.keys() - needed.keys() - {hugging_face_name("head.out")}
        if others := sorted(name for name in spare if not MADE_ANEW.fullmatch(name)):
            what = f"cannot start from {self.folder}: the model has no place for {others[0]}"
            raise UserError(what, OTHER, "checkpoint_tensor")

    def _shape(self, module: str) -> tuple[int, ...]:
        """As Hugging Face has it: (out, in)."""
        m, vocab = self._spec.model, self._spec.vocab_size
        assert m.kv_heads is not None
        assert m.head_dim is not None
        assert m.hidden is not None
        inner, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        return {
            "embed": (vocab, m.width),
            "head.out": (vocab, m.width),
            "head.norm": (m.width,),
            "attn_norm": (m.width,),
            "mlp_norm": (m.width,),
            "attn.q": (inner, m.width),
            "attn.k": (kv, m.width),
            "attn.v": (kv, m.width),
            "attn.o": (m.width, inner),
            "attn.q_norm": (m.head_dim,),
            "attn.k_norm": (m.head_dim,),
            "mlp.gate": (m.hidden, m.width),
            "mlp.up": (m.hidden, m.width),
            "mlp.down": (m.width, m.hidden),
        }[re.sub(r"^layers\.\d+\.", "", module)]


def _unreadable(path: Path, error: Exception) -> UserError:
    if isinstance(error, OSError):
        return UserError(f"cannot read {path}: {error.strerror or error}", "check the path and the disk", "checkpoint")
    return UserError(f"{path} is damaged: {error}", _FETCH, "checkpoint_damaged")
