"""Text sources: an iterator of documents, read in pieces so that memory stays flat.

A piece is at most 16 Ki characters, cut at a line end where there is one. `Piece.ends` marks a document's last.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protomodels_cli.data.errors import DataError, unreadable
from protomodels_cli.spec.corpus import DataSpec

PIECE = 16 * 1024  # characters


@dataclass(frozen=True)
class Piece:
    text: str
    ends: bool


def builtin_files() -> list[Path]:
    """Python's language reference and library sources: real text that every installation carries."""
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = library / "pydoc_data" / "topics.py"
    skipped = {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "lib2to3",
    }
    sources = []
    for folder, below, names in os.walk(library):
        below[:] = set(below) - skipped  # not walked: a coordinator lists these files whenever it starts
        sources += [path for name in names if name.endswith(".py") and (path := Path(folder, name)) != topics]
    sources.sort()
    return [topics, *sources] if topics.exists() else sources


def source_files(data: DataSpec, field: Literal["files", "val_files"], base: Path) -> list[Path]:
    """The files of a source, each once, in a stable order. Every pattern must match something."""
    if data.source == "builtin":
        return builtin_files() if field == "files" else []
    found: dict[Path, Path] = {}  # by real path: a file that two patterns match must not be read twice
    for pattern in getattr(data, field):
        matches = sorted(Path(p) for p in glob.glob(str(base / pattern), recursive=True))
        matches = [p for p in matches if p.is_file()]
        if not matches:
            raise DataError(
                f"data.{field}: {pattern!r} matches no file below {base.resolve()}",
                "check the pattern; paths are relative to the spec file",
                "no_file",
            )
        for path in matches:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def pieces(data: DataSpec, files: list[Path]) -> Iterator[Piece]:
    """All text of `files`, at most data.max_bytes of it. What UTF-8 cannot encode (half an emoji) becomes `?`."""
    left = data.max_bytes if data.max_bytes is not None else float("inf")
    for piece in _all_pieces(data, files):
        encoded = piece.text.encode("utf-8", "replace")
        if len(encoded) >= left:
            yield Piece(encoded[: int(left)].decode("utf-8", "ignore"), True)
            return
        left -= len(encoded)
        yield Piece(encoded.decode("utf-8"), piece.ends)


def _all_pieces(data: DataSpec, files: list[Path]) -> Iterator[Piece]:
    for file in files:
        try:
            match data.source:
                case "jsonl":
                    yield from _jsonl(file, data.field)
                case "parquet":
                    yield from _parquet(file, data.field)
                case _:
                    yield from _text(file)
        except OSError as e:
            raise unreadable(file, e) from None


def _text(file: Path) -> Iterator[Piece]:
    """A file as one document, read line by line (a huge line is cut)."""
    waiting: list[str] = []
    size = 0
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        while line := lines.readline(PIECE):
            if waiting and size + len(line) > PIECE:
                yield Piece("".join(waiting), False)
                waiting, size = [], 0
            waiting.append(line)
            size += len(line)
    if waiting:
        yield Piece("".join(waiting), True)


def _document(text: str) -> Iterator[Piece]:
    """A document that is in memory already; cut where it is long."""
    for start in range(0, len(text), PIECE):
        yield Piece(text[start : start + PIECE], start + PIECE >= len(text))


def _jsonl(file: Path, field: str) -> Iterator[Piece]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(
                    f"{file}:{number} is not a JSON object with the text field {field!r}",
                    "correct the line, or set data.field to the name of the text field",
                    "jsonl",
                )
            yield from _document(text)


def _parquet(file: Path, field: str) -> Iterator[Piece]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        what = "reading parquet files needs the package pyarrow"
        raise DataError(what, "pip install 'pmtrain[parquet]'", "missing_package") from None
    import pyarrow

    try:
        opened = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid:
        raise DataError(f"{file} is not a parquet file", "check data.source and data.files", "parquet") from None
    with opened:
        if field not in opened.schema_arrow.names:
            raise DataError(
                f"{file} has no column {field!r}, only {', '.join(opened.schema_arrow.names)}",
                "set data.field to the name of the text column",
                "parquet_column",
            )
        for batch in opened.iter_batches(batch_size=256, columns=[field]):
            for text in batch.column(0).to_pylist():
                if isinstance(text, str):
                    yield from _document(text)
