"""What a model is evaluated on: files of any kind that a spec knows, read as they are scored, never all in memory."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protomodels_cli.data.errors import DataError, unreadable
from protomodels_cli.data.shards import TokenStream, external_shard
from protomodels_cli.data.sources import Input, pieces, source_files
from protomodels_cli.inference.load import Loaded
from protomodels_cli.spec.corpus import DataSpec

OWN = "builtin", "python"  # texts that need no file
_TOKENS_AT_ONCE, _PIECES_AT_ONCE = 1 << 16, 256


class Data:
    """Files, patterns, folders and builtin texts, in the order in which they are named."""

    def __init__(self, names: list[str], field: str, loaded: Loaded):
        self._loaded, self._field = loaded, field
        self._inputs = [one for name in names for one in _inputs(name)]
        texts = [one for one in self._inputs if one.kind != "bin"]
        if texts and loaded.tokenizer is None:
            raise DataError(
                f"{texts[0].path} is text, and this model has no tokenizer: it was trained on ids",
                "name files of ids (.bin) with --data",
                "no_tokenizer",
            )
        self._sizes = [one.size() for one in self._inputs]
        self._read, self._position = 0, 0  # files read to their end, and bytes of the next one

    @property
    def share(self) -> float:
        """How much of all bytes has been read."""
        return (sum(self._sizes[: self._read]) + self._position) / max(1, sum(self._sizes))

    def chunks(self) -> Iterator[np.ndarray]:
        """All ids. A mark follows each document where the vocabulary has one, as in a run's own corpus."""
        for one in self._inputs:
            yield from self._ids(one) if one.kind == "bin" else self._texts(one)
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

    def _texts(self, one: Input) -> Iterator[np.ndarray]:
        tokenizer, end = self._loaded.tokenizer, self._loaded.document_end
        assert tokenizer is not None
        source = pieces(DataSpec(field=self._field), [one])
        while group := list(itertools.islice(source, _PIECES_AT_ONCE)):
            for ids, piece in zip(tokenizer.encode([p.text for p in group]), group, strict=True):
                self._position = piece.position
                yield ids
                if piece.ends and end is not None:
                    yield np.array([end])


def _inputs(name: str) -> list[Input]:
    if name in OWN:
        return source_files(DataSpec.model_validate({"source": name}), "files", Path())
    ids = [Path(path) for path in sorted(glob.glob(name, recursive=True)) if path.endswith(".bin")]
    if ids:
        return [Input("bin", path) for path in ids]
    try:
        return source_files(DataSpec(source="files", files=[name]), "files", Path())
    except DataError as e:
        raise DataError(f"--data {name}: there is no text", "check the path or the pattern", e.kind) from None
