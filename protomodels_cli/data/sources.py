"""Text sources: an iterator of documents, read in pieces so that memory stays flat.

A piece is at most 16 Ki characters, cut at a line end where there is one. `Piece.ends` marks a document's last.
"""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from protomodels_cli import quantities
from protomodels_cli.data.compressed import bare_name, compression, opened
from protomodels_cli.data.errors import DataError, missing_package, unreadable
from protomodels_cli.spec.corpus import DataSpec

PIECE = 16 * 1024  # characters
SHIPPED = Path(__file__).parent / "texts" / "sotu.txt.xz"
LONGEST_LINE = 256 << 20  # bytes of a JSON line, which must be in memory whole
_BINARY_WITHIN = 8 * 1024
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Input:
    """One file, or one split of a dataset (whose `path` is its folder, if it lies on this machine).

    `kind` says how it is read: `text` is one document, `lines` one for every line."""

    kind: str
    path: Path | None
    split: str = ""

    def size(self) -> int:
        return self.path.stat().st_size if self.path is not None and self.kind != "hf" else 0

    def is_packed(self) -> bool:
        """Whether it may have more text than bytes on disk."""
        return self.kind == "parquet" or (self.path is not None and compression(self.path) is not None)


class Place(NamedTuple):
    """How far inputs have been read: so many of them whole, pieces of the next one, and bytes of text in all."""

    inputs: int = 0
    pieces: int = 0
    bytes: int = 0


class Piece(NamedTuple):
    text: str
    ends: bool
    after: Place = Place()  # where reading goes on after this piece
    position: int = 0  # in its input as it lies on disk


Read = Iterator[tuple[str, bool, int]]  # a piece's text, whether a document ends there, the position


def python_files() -> list[Path]:
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


def is_binary(path: Path) -> bool:
    """Whether a file's content is no text: its first bytes have a NUL."""
    with opened(path) as (content, _):
        return b"\0" in content.read(_BINARY_WITHIN)


def source_files(
    data: DataSpec,
    field: Literal["files", "val_files"],
    base: Path,
    is_binary: Callable[[Path], bool] = is_binary,
) -> list[Input]:
    """What a source reads, each file once, in a stable order. Every pattern must match something."""
    training = field == "files"
    match data.source:
        case "builtin":
            return [Input("lines", SHIPPED)] if training else []
        case "python":
            return [Input("text", path) for path in python_files()] if training else []
        case "hf":
            assert data.dataset is not None
            folder = base / data.dataset
            split = data.split if training else data.val_split
            return [Input("hf", folder if folder.is_dir() else None, split)] if split else []
    found: dict[Path, Input] = {}  # by real path: a file that two patterns match must not be read twice
    for pattern in getattr(data, field):
        matches = sorted(_matching(base / pattern))
        if data.source == "files":
            matches = [file for path in matches for file in (below(path) if path.is_dir() else [path])]
            inputs = [Input(_kind_of(path), path) for path in matches if not _skipped(path, is_binary)]
        else:
            inputs = [Input(data.source, path) for path in matches if path.is_file()]
        if not inputs:
            raise _nothing(data, field, pattern, base, matches)
        for one in inputs:
            assert one.path is not None
            found.setdefault(one.path.resolve(), one)
    return list(found.values())


def below(folder: Path) -> list[Path]:
    """All files in a folder and in its folders, sorted; hidden ones are left out."""
    found = (where / name for where, names in _folders(folder) for name in names if not name.startswith("."))
    return sorted(path for path in found if path.is_file())


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those below it that are not hidden, each with its files' names. Links to folders are left out: they
    may lead anywhere, also back."""
    for where, folders, names in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield Path(where), names


def _matching(pattern: Path) -> set[Path]:
    """As glob.glob, whose `**` follows links to folders."""
    if "**" not in pattern.parts:
        return {Path(path) for path in glob.glob(str(pattern))}
    at = pattern.parts.index("**")
    rest = pattern.parts[at + 1 :] or ("*",)
    folders = {folder for top in _matching(Path(*pattern.parts[:at])) for folder, _ in _folders(top)}
    found = {path for folder in folders for path in _matching(Path(glob.escape(str(folder)), *rest))}
    return {path for path in found if not (path.is_dir() and path.is_symlink())}


def _kind_of(path: Path) -> str:
    return _KINDS.get(Path(bare_name(path)).suffix.lower(), "text")


def _skipped(path: Path, is_binary: Callable[[Path], bool]) -> bool:
    try:
        return _kind_of(path) != "parquet" and is_binary(path)
    except OSError as e:
        raise unreadable(path, e) from None


def _nothing(data: DataSpec, field: str, pattern: str, base: Path, matches: list[Path]) -> DataError:
    what = f"data.{field}: {pattern!r} matches no file below {base.resolve()}"
    if data.source == "files" and matches:
        what = f"data.{field}: {pattern!r} matches only binary files below {base.resolve()}"
        return DataError(what, "name files or folders of text", "no_file")
    if data.source != "files" and matches:
        what = f"data.{field}: {pattern!r} is a folder, and data.source {data.source} reads files"
        return DataError(what, f"set data.source to files, or write `{pattern.rstrip('/')}/*`", "no_file")
    return DataError(what, "check the pattern; paths are relative to the spec file", "no_file")


def pieces(data: DataSpec, inputs: list[Input], place: Place = Place()) -> Iterator[Piece]:
    """All text of `inputs` after `place`, at most data.max_bytes of it in all.

    What UTF-8 cannot encode (half an emoji) becomes `?`."""
    most = data.max_bytes if data.max_bytes is not None else float("inf")
    done = place.bytes
    for number in range(place.inputs, len(inputs)):
        first = place.pieces if number == place.inputs else 0
        for count, (text, ends, position) in enumerate(
            itertools.islice(_read(data, inputs[number]), first, None), first
        ):
            if done >= most:
                return
            encoded = text.encode("utf-8", "replace")
            if done + len(encoded) >= most:
                text, ends = encoded[: int(most - done)].decode("utf-8", "ignore"), True
                done = int(most)
            else:
                text, done = encoded.decode("utf-8"), done + len(encoded)
            yield Piece(text, ends, Place(number, count + 1, done), position)


def _read(data: DataSpec, one: Input) -> Read:
    if one.kind == "hf":
        from protomodels_cli.data.hub import documents

        for text in documents(data, one.path, one.split):
            yield from _document(text, 0)
        return
    assert one.path is not None
    try:
        match one.kind:
            case "jsonl":
                yield from _jsonl(one.path, data.field)
            case "parquet":
                yield from _parquet(one.path, data.field)
            case "lines":
                yield from _lines(one.path)
            case _:
                yield from _text(one.path)
    except OSError as e:
        raise unreadable(one.path, e) from None


def _text(file: Path) -> Read:
    """A file as one document, read line by line (a huge line is cut)."""
    waiting: list[str] = []
    size = 0
    with opened(file) as (content, raw):
        lines = io.TextIOWrapper(content, encoding="utf-8", errors="replace", newline="")
        while line := lines.readline(PIECE):
            if waiting and size + len(line) > PIECE:
                yield "".join(waiting), False, raw.tell()
                waiting, size = [], 0
            waiting.append(line)
            size += len(line)
        if waiting:
            yield "".join(waiting), True, raw.tell()


def _lines(file: Path) -> Read:
    """Every line that is not empty as a document."""
    with opened(file) as (content, raw):
        for line in io.TextIOWrapper(content, encoding="utf-8"):
            yield from _document(line.strip(), raw.tell())


def _document(text: str, position: int) -> Read:
    """A document that is in memory already. Where it is long it is cut after a line, or else between two words."""
    start = 0
    while len(text) - start > PIECE:
        end = start + PIECE
        end = text.rfind("\n", start + PIECE // 2, end) + 1 or max(text.rfind(" ", start + PIECE // 2, end), 0) or end
        yield text[start:end], False, position
        start = end
    if text:
        yield text[start:], True, position


def _jsonl(file: Path, field: str) -> Read:
    with opened(file) as (content, raw):
        for number in itertools.count(1):
            line = content.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{file}:{number} is longer than {quantities.size(LONGEST_LINE)}, the most for a JSON line",
                    "write one JSON object a line and divide long texts, or read the file with data.source text",
                    "jsonl",
                )
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8", "replace"))[field]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise DataError(
                    f"{file}:{number} is not a JSON object with the text field {field!r}",
                    "correct the line, or set data.field to the name of the text field",
                    "jsonl",
                )
            yield from _document(text, raw.tell())


def _parquet(file: Path, field: str) -> Read:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_package("reading parquet files", "pyarrow", "pyarrow>=15") from None
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
        rows, size = 0, file.stat().st_size
        for batch in opened.iter_batches(batch_size=256, columns=[field]):
            rows += batch.num_rows
            for text in batch.column(0).to_pylist():
                if isinstance(text, str):
                    yield from _document(text, size * rows // opened.metadata.num_rows)
