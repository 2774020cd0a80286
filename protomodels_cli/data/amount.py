"""How much there is to train on, before anything is read: tokens by the sizes of files. About, and fast."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from protomodels_cli.data.compressed import compression
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.sources import Input, python_files, source_files
from protomodels_cli.spec.corpus import DataSpec
from protomodels_cli.spec.schema import RunSpec

SHIPPED_BYTES = 10_761_879  # of the builtin text
PACKED = 3.5  # bytes of text for one of a compressed or parquet file
# Bytes of text for a token, by the size of the vocabulary: of English, with a tokenizer that was trained on it.
_VOCABULARIES = (256, 1024, 4096, 16_384, 32_768)
_BYTES_EACH = (1.0, 2.9, 4.0, 4.9, 5.1, 5.2)
TEXT_EACH = 5.0  # about, where the vocabulary is not known yet
ENOUGH = 4  # times that a text may be read: up to here it is nearly as good as new text (Muennighoff et al. 2023)


def bytes_each(spec: RunSpec) -> float:
    """Bytes of the data for each token."""
    if spec.data.source == "bin":
        return 2.0 if spec.vocab_size <= 1 << 16 else 4.0
    return 1.0 if spec.tokenizer.kind == "bytes" else _BYTES_EACH[bisect_left(_VOCABULARIES, spec.vocab_size)]


def tokens_of(spec: RunSpec, base: Path) -> float | None:
    """Tokens that the data have for training; None: it is not known here, for example since no file is."""
    try:
        text = _bytes(spec.data, base)
    except DataError:
        return None
    if text is None:
        return None
    if spec.data.max_bytes is not None:
        text = min(text, spec.data.max_bytes)
    held_out = 0.0 if spec.data.val_files else spec.data.val_fraction
    return text / bytes_each(spec) * (1 - held_out)


def _bytes(data: DataSpec, base: Path) -> float | None:
    match data.source:
        case "builtin":
            return SHIPPED_BYTES
        case "python":
            return float(sum(path.stat().st_size for path in python_files()))
        case "hf":
            return None
    # Not read: a file that is no text counts here, and is left out when the run begins.
    return sum(map(_text_bytes, source_files(data, "files", base, lambda _: False)))


def _text_bytes(one: Input) -> float:
    packed = one.kind == "parquet" or (one.path is not None and compression(one.path) is not None)
    return one.size() * (PACKED if packed else 1.0)
