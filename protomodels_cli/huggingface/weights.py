"""The tensors of a checkpoint's files, by Hugging Face's names: the one reader of them. Needs numpy, no torch."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from protomodels_cli.errors import UserError
from protomodels_cli.files import hash_file
from protomodels_cli.huggingface.architecture import Architecture
from protomodels_cli.huggingface.files import INDEX, WEIGHTS, BadIndex, NoWeights, weight_files
from protomodels_cli.huggingface.names import hugging_face_name
from protomodels_cli.safetensors_file import SafetensorsError, SafetensorsFile
from protomodels_cli.spec.checkpoint import CONFIG

if TYPE_CHECKING:
    import numpy as np

FLOATS = "F64", "F32", "F16", "BF16"
MADE_ANEW = re.compile(r".*\.rotary_emb\.inv_freq")  # older files have it; it follows from rope_theta
_FETCH = "fetch the checkpoint again, all files of it, or export the run again"
_OTHER = "use a plain Llama or Qwen3, its weights with its own config.json"


class Weights:
    """Opened for reading, its files held open; closes with its `with` block. Raises UserError: also where the files'
    headers do not say what the model needs, before any of its memory is taken."""

    def __init__(self, folder: Path, architecture: Architecture):
        self.folder = folder
        self._opened = contextlib.ExitStack()
        try:
            self._files = {path: self._open(path) for path in self._list()}
            self._holder = {name: file for file in self._files.values() for name in file.tensors}
            self._check(architecture.weights)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """In float32, or float64 where the file has that."""
        file = self._holder[name]
        try:
            return file.array(name)
        except (SafetensorsError, OSError) as e:
            raise _unreadable(file.path, e) from None

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

    def _list(self) -> list[Path]:
        """The files with weights."""
        try:
            return weight_files(self.folder)
        except NoWeights:
            what = f"{self.folder} has neither {WEIGHTS} nor {INDEX}"
            fix = "name a folder with all files of a checkpoint, its weights as safetensors (save_pretrained of "
            raise UserError(what, f"{fix}transformers writes them so)", "checkpoint_no_weights") from None
        except OSError as e:
            raise _unreadable(self.folder / INDEX, e) from None
        except BadIndex:
            what = f"{self.folder / INDEX} does not say which file has which weights"
            raise UserError(what, _FETCH, "checkpoint_damaged") from None

    def _open(self, path: Path) -> SafetensorsFile:
        try:
            return self._opened.enter_context(SafetensorsFile(path))
        except (SafetensorsError, OSError) as e:
            raise _unreadable(path, e) from None

    def _check(self, needed: dict[str, tuple[int, ...]]) -> None:
        """That all weights are there as the model needs them, and no others."""
        spare = self._holder.keys() - needed.keys() - {hugging_face_name("head.out")}  # which a tied model may have
        if others := sorted(name for name in spare if not MADE_ANEW.fullmatch(name)):
            what = f"{others[0]} in {self.folder} is no weight of the model that {CONFIG} describes"
            raise UserError(what, _OTHER, "checkpoint_tensor")
        for name, shape in needed.items():
            if name not in self._holder:
                raise UserError(f"{self.folder} has no weight {name}", _FETCH, "checkpoint_incomplete")
            found = self._holder[name].tensors[name]
            if found.shape != shape or found.dtype not in FLOATS:
                raise UserError(
                    f"{name} in {self.folder} is {found.dtype} of the shape {list(found.shape)}, and {CONFIG} asks for "
                    f"floating-point numbers of the shape {list(shape)}",
                    _OTHER,
                    "checkpoint_tensor",
                )


def _unreadable(path: Path, error: Exception) -> UserError:
    if isinstance(error, OSError):
        return UserError(f"cannot read {path}: {error.strerror or error}", "check the path and the disk", "checkpoint")
    return UserError(f"{path} is damaged: {error}", _FETCH, "checkpoint_damaged")
