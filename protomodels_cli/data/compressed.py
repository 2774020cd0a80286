"""Files that may be compressed, read as if they were not: the end of a name says how (.gz, .xz, .bz2, .zst)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from protomodels_cli.data.errors import DataError, missing_package
from protomodels_cli.quantities import size

_AT_ONCE = 1 << 14
_ZSTD_PIECE = 256  # bytes: four may stand for a block of 128 KiB, so a piece is at most 8 MiB of text
_ZSTD_HEADER = 18  # bytes at most
_ZSTD_WINDOW = 1 << 27, 1 << 31  # bytes: what is always given to it, and what it can be given (zstd --long=31)


def bare_name(path: Path) -> str:
    """The name without the ending that says how the file is compressed."""
    return path.stem if compression(path) else path.name


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file's content, and the file itself, whose position says how much of it has been read."""
    with path.open("rb") as file, _damage(path), _decompressed(path, file) as content:
        yield content, file


def compression(path: Path) -> str | None:
    """The ending of the name that says how the file is compressed."""
    return path.suffix if path.suffix in (".gz", ".xz", ".bz2", ".zst") else None


def _decompressed(path: Path, file: IO[bytes]) -> IO[bytes]:
    # Imported here: a coordinator that comes back needs none of them.
    match compression(path):
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
            raise missing_package("reading .zst files", "zstandard", "zstandard>=0.22") from None
        self._zstd, self._path, self._file = zstandard, path, file
        self._frame: Any = None
        self._packed = self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if len(self._packed) < _ZSTD_HEADER:
                self._packed = memoryview(bytes(self._packed) + self._file.read(_AT_ONCE))
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            piece = self._packed[:_ZSTD_PIECE]
            self._ready = memoryview(self._frame.decompress(piece))
            self._packed = self._packed[len(piece) - len(self._frame.unused_data) :]
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _new_frame(self) -> Any:
        window = self._zstd.get_frame_parameters(self._packed[:_ZSTD_HEADER]).window_size
        least, most = _ZSTD_WINDOW
        most = min(max(least, _memory() // 4), most)
        if window > most:
            raise DataError(
                f"{self._path} takes {size(window)} of memory to decompress (zstd --long), and this machine has "
                f"{size(most)} for that: a quarter of its memory",
                "compress the file again without --long, or start on a machine with more memory",
                "window",
            )
        return self._zstd.ZstdDecompressor(max_window_size=most).decompressobj()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What the decompressors raise, each in its own way, as one error."""
    ending = compression(path)
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
