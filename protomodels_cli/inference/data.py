"""What a model is evaluated on: files of any kind that a spec knows, read as they are scored, never all in memory."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np

from protomodels_cli.data.errors import DataError, unreadable
from protomodels_cli.data.shards import TokenStream, external_shard
from protomodels_cli.data.sources import Input, is_binary, pieces, source_files
from protomodels_cli.errors import OptionError
from protomodels_cli.inference.load import Loaded
from protomodels_cli.spec.corpus import DataSpec

OWN = "builtin", "python"  # texts that need no file
SOURCES = get_args(DataSpec.model_fields["source"].annotation)
SETTINGS = "config", "split", "revision"  # of a dataset
_TOKENS_AT_ONCE, _PIECES_AT_ONCE = 1 << 16, 256


class Data:
    """Whatever a spec can name as its data, in the order in which it is named."""

    def __init__(self, names: list[str], field: str, loaded: Loaded):
        self._loaded = loaded
        self.skipped: list[Path] = []  # files that are no text
        self._inputs: list[tuple[DataSpec, Input]] = []
        for name in names:
            data = _spec(name, field)
            self._inputs += [(data, one) for one in self._found(name, data)]
        texts = [one.path or data.dataset for data, one in self._inputs if one.kind != "bin"]
        if texts and loaded.tokenizer is None:
            raise DataError(
                f"{texts[0]} is text, and this model has no tokenizer: it was trained on ids",
                "name files of ids (.bin) with --data",
                "no_tokenizer",
            )
        self._sizes = [one.size() for _, one in self._inputs]
        self._read, self._position = 0, 0  # files read to their end, and bytes of the next one

    @property
    def share(self) -> float:
        """How much of all bytes has been read."""
        return (sum(self._sizes[: self._read]) + self._position) / max(1, sum(self._sizes))

    def chunks(self) -> Iterator[np.ndarray]:
        """All ids. A mark follows each document where the vocabulary has one, as in a run's own corpus."""
        for data, one in self._inputs:
            yield from self._ids(one) if one.kind == "bin" else self._texts(data, one)
            self._read, self._position = self._read + 1, 0

    def _ids(self, one: Input) -> Iterator[np.ndarray]:
        assert one.path is not None
        try:
            stream = TokenStream([external_shard(one.path, self._loaded.decoder.architecture.vocab_size)], Path())
        except OSError as e:
            raise unreadable(one.path, e) from None
        for start in range(0, len(stream), _TOKENS_AT_ONCE):
            ids = stream.read(start, min(_TOKENS_AT_ONCE, len(stream) - start))
            self._position += 2 * len(ids)
            yield ids

    def _texts(self, data: DataSpec, one: Input) -> Iterator[np.ndarray]:
        tokenizer, end = self._loaded.tokenizer, self._loaded.document_end
        assert tokenizer is not None
        source = pieces(data, [one])
        while group := list(itertools.islice(source, _PIECES_AT_ONCE)):
            for ids, piece in zip(tokenizer.encode([p.text for p in group]), group, strict=True):
                self._position = piece.position
                yield ids
                if piece.ends and end is not None:
                    yield np.array([end])

    def _found(self, name: str, data: DataSpec) -> list[Input]:
        """Files of ids are those that a pattern itself matches: a folder means the text below it."""
        named = [Path(p) for pattern in data.files for p in glob.glob(str(Path(pattern)), recursive=True)]
        ids = {path for path in named if data.source == "files" and path.suffix == ".bin" and path.is_file()}
        skipped: list[Path] = []

        def is_no_text(path: Path) -> bool:
            if path in ids:
                return True
            if path.suffix == ".bin" or is_binary(path):
                skipped.append(path)
                return True
            return False

        try:
            found = source_files(data, "files", Path(), is_no_text)
        except DataError as e:
            if e.kind != "no_file":
                raise
            found = []
        found += [Input("bin", path) for path in ids]
        if not found:
            what = f"--data {name}: there {'are only binary files' if skipped else 'is no text'}"
            fix = "name text, or files of ids (.bin)" if skipped else "check the path or the pattern"
            raise DataError(what, fix, "no_file")
        self.skipped += dict.fromkeys(skipped)
        return sorted(found, key=lambda one: one.path or Path()) if ids else found


def _spec(name: str, field: str) -> DataSpec:
    """What a spec would say: NAME is builtin, python, or files by their names; SOURCE:NAME is of any source."""
    if name in OWN:
        return DataSpec.model_validate({"source": name})
    source, _, rest = name.partition(":")
    if source not in SOURCES or source in OWN:
        return DataSpec(source="files", files=[name], field=field)
    if source != "hf":
        return DataSpec.model_validate({"source": source, "files": [rest], "field": field})
    dataset, *settings = rest.split(",")
    given = {name: value for name, _, value in (setting.partition("=") for setting in settings)}
    if not dataset or not all(name in SETTINGS and value for name, value in given.items()):
        fix = f"write hf:DATASET, and where it needs them {', '.join(f'{name}=…' for name in SETTINGS)} after commas"
        raise OptionError(f"--data {name}: this is no dataset", fix, "dataset")
    return DataSpec.model_validate({"source": "hf", "dataset": dataset, "field": field, **given})
