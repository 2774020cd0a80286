"""Files that may be compressed, read as if they were not: the end of a name says how (.gz, .xz, .bz2, .zst)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from protomodels_cli.data.errors import DataError, missing_package

_AT_ONCE = 1 << 14
_WINDOW = 1 << 31  # zstd --long=31, as some large collections have it


def bare_name(path: Path) -> str:
    """The name without the ending that says how the file is compressed."""
    return path.stem if _ending(path) else path.name


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file's content, and the file itself, whose position says how much of it has been read."""
    with path.open("rb") as file, _damage(path), _decompressed(path, file) as content:
        yield content, file


def _ending(path: Path) -> str | None:
    return path.suffix if path.suffix in (".gz", ".xz", ".bz2", ".zst") else None


def _decompressed(path: Path, file: IO[bytes]) -> IO[bytes]:
    # Imported here: a coordinator that comes back needs none of them.
    match _ending(path):
        case ".gz":
            import gzip

            return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
        case ".xz":
            import lzma

            return cast("IO[bytes]", lzma.LZMAFile(file))
        case ".bz2":
            import bz2

            return cast("IO[bytes]", bz2.BZ2File(file))
        case ".zst":
            return io.BufferedReader(_Zstd(path, file), 1 << 17)
        case _:
            return file


class _Zstd(io.RawIOBase):
    """The frames of a .zst file, end to end. The package's own reader does not tell a cut file from a whole one."""

    def __init__(self, path: Path, file: IO[bytes]):
        try:
            import zstandard
        except ImportError:
            raise missing_package("reading .zst files", "zstandard", "zstandard") from None
        self._file, self._new = file, lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(_AT_ONCE)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._frame = self._frame or self._new()
            self._ready, self._packed = self._frame.decompress(self._packed), b""
            if self._frame.eof:
                self._frame, self._packed = None, self._frame.unused_data
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What the decompressors raise, each in its own way, as one error."""
    ending = _ending(path)
    try:
        yield
    except Exception as e:
        if ending is None or not _is_damage(e):
            raise
        raise DataError(
            f"{path} is damaged, or is not a {ending} file: {e}", "compress the file again", "compressed"
        ) from None


def _is_damage(error: Exception) -> bool:
    if isinstance(error, OSError):  # gzip's and bz2's own have no number, unlike the disk's
        return error.errno is None
    return isinstance(error, EOFError) or type(error).__name__ in ("error", "LZMAError", "ZstdError")
