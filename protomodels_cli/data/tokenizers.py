"""Tokenizers: text pieces to ids. Three kinds behind one interface."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from protomodels_cli.data.errors import DataError
from protomodels_cli.spec.corpus import TokenizerSpec

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]", "\0")  # the last: of exported bytes
BPE_SAMPLE_BYTES = 16 * 1024 * 1024  # what a new vocabulary is learned from, so that memory stays flat


class Tokenizer(Protocol):
    vocab_size: int
    end_id: int | None  # written after each document, where the vocabulary has such a mark

    @property
    def bytes_per_id(self) -> np.ndarray | None:
        """Bytes of UTF-8 text, where that does not depend on an id's neighbours."""
        ...

    def encode(self, texts: list[str]) -> list[np.ndarray]: ...
    def decode(self, ids: list[int]) -> str: ...
    def save(self, folder: Path) -> None: ...
    def sha256(self) -> str: ...


class Bytes:
    """UTF-8 bytes as they are; NUL, which text hardly ever contains, ends a document."""

    vocab_size = 256
    end_id: int | None = 0
    bytes_per_id = np.array([0] + 255 * [1])

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode("utf-8", "replace"), dtype=np.uint8) for t in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Bytes need no file."""

    def sha256(self) -> str:
        return hashlib.sha256(b"bytes").hexdigest()


class Json:
    """A tokenizer.json, from a file or just trained."""

    def __init__(self, text: str, name: str = "tokenizer.json"):
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
        except Exception as e:  # the library raises bare Exception
            raise _unusable(name, f"is not a tokenizer.json: {e}") from None
        ids = self._inner.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise _unusable(name, "has an empty vocabulary")
        self._inner.no_truncation()  # settings for serving, which many exported files carry
        self._inner.no_padding()
        self._text = text
        self.vocab_size = max(ids) + 1
        ends = (self._inner.token_to_id(n) for n in _END_NAMES)
        self.end_id = next((i for i in ends if i is not None), None)

    @functools.cached_property
    def bytes_per_id(self) -> np.ndarray | None:
        """Where ids are spelled byte by byte, each with a letter of its own. Special tokens are no text."""
        if (json.loads(self._text).get("decoder") or {}).get("type") != "ByteLevel":
            return None
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            sizes[i] = len(token)
        for i, added in self._inner.get_added_tokens_decoder().items():
            sizes[i] = 0 if added.special else len(added.content.encode())
        return sizes

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.uint32) for e in encoded]

    def marks_before(self) -> tuple[int, ...]:
        """What whoever serves a model of this tokenizer puts before every text: Llama 3's begin of text, say."""
        bare, marked = (self._inner.encode("a", add_special_tokens=marked).ids for marked in (False, True))
        return tuple(marked[: marked.index(bare[0])]) if bare else ()

    def decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self._text, encoding="utf-8")

    def sha256(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()


def _unusable(name: str, why: str) -> DataError:
    return DataError(f"{name} {why}", "write the file with Hugging Face's tokenizers", "tokenizer_file")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Json:
    """A byte-level byte-pair vocabulary learned from the first texts."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_sample(texts), trainer)
    return Json(inner.to_str())


def _sample(texts: Iterable[str]) -> Iterable[str]:
    left = BPE_SAMPLE_BYTES
    for text in texts:
        yield text
        left -= len(text)
        if left <= 0:
            return


def make_tokenizer(spec: TokenizerSpec, base: Path, texts: Iterable[str]) -> Tokenizer:
    """The spec's tokenizer; `texts` is what a bpe is trained on."""
    if spec.kind == "bytes":
        return Bytes()
    if spec.kind == "bpe":
        assert spec.vocab_size is not None
        return train_bpe(texts, spec.vocab_size)
    assert spec.file is not None
    path = base / spec.file
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise DataError(
            f"tokenizer.file: {path} cannot be read: {e.strerror}",
            "check the path; paths are relative to the spec file",
            "unreadable",
        ) from None
    except UnicodeDecodeError:
        raise _unusable(str(path), "is not a tokenizer.json: the text is not UTF-8") from None
    return Json(text, str(path))
