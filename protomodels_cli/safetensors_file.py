"""Safetensors files without the package of that name: a coordinator, which has no torch, reads and writes weights.

    8 bytes: length of the header | header: JSON, name → dtype, shape, [start, end) | the tensors' bytes, end to end

A file is read piece by piece from an open descriptor: it may be deleted or replaced meanwhile, no more than one tensor
is in memory, and a disk that fails says so (a mapped file would end the process). Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer
else:
    np = lazy_import("numpy")

LARGEST_HEADER = 100_000_000  # the format's own bound
# Numbers that weights are made of: their names in specs, numpy and torch → as the format writes them.
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PIECE = 1 << 30  # a single read cannot bring more than 2 GiB
_HASHED = 1 << 20  # bytes read at one time to hash them
_WIDTHS = {
    8: ("F64", "I64", "U64"),
    4: ("F32", "I32", "U32"),
    2: ("BF16", "F16", "I16", "U16"),
    1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"),
}
_BYTES = {dtype: width for width, dtypes in _WIDTHS.items() for dtype in dtypes}  # of one number
_NUMPY = {f"{kind.upper()}{8 * n}": f"<{kind}{n}" for kind in "iu" for n in (1, 2, 4, 8)}
_NUMPY |= {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?"}
Described = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def bytes_of(dtype: str) -> int:
    """What one number takes, by a name of DTYPES or as the format writes it."""
    return _BYTES[DTYPES.get(dtype, dtype)]


class SafetensorsError(ValueError):
    """Why a file is no safetensors file, or is damaged."""


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str  # as the format writes it: F32, BF16, …
    shape: tuple[int, ...]
    start: int  # within the file
    end: int


class SafetensorsFile:
    """A file opened for reading; closes with its `with` block. OSError where it cannot be read at all."""

    def __init__(self, file: Path | BufferedReader, largest_header: int = LARGEST_HEADER):
        if isinstance(file, Path):
            self.path, self._handle = file, os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        else:
            self.path, self._handle = Path(file.name), os.dup(file.fileno())
        try:
            size = os.fstat(self._handle).st_size
            self.tensors, self.metadata = header_of(self._read, size, largest_header)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def bytes(self, name: str) -> memoryview:
        """A tensor's bytes as the file has them, in memory of their own."""
        info = self.tensors[name]
        return self._read(info.start, info.end, f"tensor {name}")

    def sha256(self) -> str:
        """The hash of the whole file."""
        digest = hashlib.sha256()
        size, at = os.fstat(self._handle).st_size, 0
        while at < size:
            digest.update(self._read(at, end := min(size, at + _HASHED), "the file"))
            at = end
        return digest.hexdigest()

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as numbers: BF16 and F16 become float32, without a change of value; others stay what they are."""
        info, content = self.tensors[name], self.bytes(name)
        if info.dtype == "BF16":  # the upper half of a float32
            wide = np.frombuffer(content, "<u2").astype("<u4")
            wide <<= 16
            return wide.view("<f4").reshape(info.shape)
        if info.dtype not in _NUMPY:
            raise SafetensorsError(f"tensor {name} is {info.dtype}, which cannot be computed with here")
        found = np.frombuffer(content, _NUMPY[info.dtype]).reshape(info.shape)
        return found.astype("<f4") if info.dtype == "F16" else found

    def is_finite(self, name: str) -> bool:
        """Whether all of a tensor's numbers are, of F32 or F64. Read piece by piece."""
        info = self.tensors[name]
        for start in range(info.start, info.end, _HASHED):  # which is a multiple of either width
            piece = self._read(start, min(info.end, start + _HASHED), f"tensor {name}")
            if not np.isfinite(np.frombuffer(piece, _NUMPY[info.dtype])).all():
                return False
        return True

    def _read(self, start: int, end: int, what: str) -> memoryview:
        content = memoryview(bytearray(end - start))
        got = 0
        while got < len(content):
            read = os.preadv(self._handle, [content[got : got + _PIECE]], start + got)
            if read == 0:
                raise SafetensorsError(f"cut short: the file ends within {what}")
            got += read
        return content


def header_of(
    read: Callable[[int, int, str], memoryview], size: int, largest: int = LARGEST_HEADER
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a file of `size` bytes, wherever it lies: `read` gets bytes from start to end, of
    what."""
    if size < 8:
        raise SafetensorsError(f"{size} bytes are fewer than the length of a header takes")
    length = int.from_bytes(read(0, 8, "the header's length"), "little")
    if length > min(size - 8, largest):
        raise SafetensorsError(
            f"the header would be {length} bytes long, and the file has {size}: cut short, or no safetensors file"
        )
    try:
        header = json.loads(bytes(read(8, 8 + length, "the header")))
    except (ValueError, RecursionError):
        raise SafetensorsError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise SafetensorsError("the header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise SafetensorsError("the metadata are not texts")
    tensors = [_info(name, fields, 8 + length) for name, fields in header.items()]
    _check_gapless(tensors, 8 + length, size)
    return {info.name: info for info in tensors}, metadata


def _info(name: str, fields: Any, data: int) -> TensorInfo:
    """One tensor's entry in the header. `data`: where the tensors' bytes begin."""
    try:
        dtype, shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise SafetensorsError(f"the header does not say what tensor {name} is") from None
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise SafetensorsError(f"tensor {name} has the unknown dtype {dtype}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise SafetensorsError(f"the shape or the offsets of tensor {name} are not whole numbers")
    if end - start != math.prod(shape) * _BYTES[dtype]:
        raise SafetensorsError(f"tensor {name} has {end - start} bytes, which do not make {dtype} of the shape {shape}")
    return TensorInfo(name, dtype, tuple(shape), data + start, data + end)


def _check_gapless(tensors: list[TensorInfo], data: int, size: int) -> None:
    at = data
    for info in sorted(tensors, key=lambda t: (t.start, t.end)):
        if info.start != at:
            wrong = "overlaps another one" if info.start < at else "leaves a gap before it"
            raise SafetensorsError(f"tensor {info.name} {wrong}")
        at = info.end
    if at != size:
        raise SafetensorsError(f"the tensors end at byte {at}, and the file has {size}")


def write_safetensors(
    path: Path,
    tensors: Iterable[Described],
    data: Callable[[str], Buffer],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write the header, then one tensor after the other as `data` gives their bytes. Syncing is the caller's.

    Wider numbers come first, otherwise the order is the caller's: so every tensor lies on a multiple of its width.
    """
    ordered = sorted(tensors, key=lambda t: -_BYTES[t[1]])
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in ordered:
        if name in header:
            raise SafetensorsError(f"there are two tensors {name}")
        end = at + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, _, _ in ordered:
            content = memoryview(data(name))
            start, end = header[name]["data_offsets"]
            if content.nbytes != end - start:
                raise SafetensorsError(f"tensor {name} has {content.nbytes} bytes instead of {end - start}")
            file.write(content)
            del content  # before the next one is made
