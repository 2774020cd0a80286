"""Text to shards of tokens, a group of pieces at a time. If it is killed, the next call goes on where it got to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from protomodels_cli import counter
from protomodels_cli.data.encoding import encoded, processes
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.shards import Shard, ShardWriter, hash_of, split_tail
from protomodels_cli.data.sources import Input, Piece, Place, pieces
from protomodels_cli.data.tokenizers import BPE_SAMPLE_BYTES, Bytes, Json, Tokenizer, make_tokenizer
from protomodels_cli.data.work import Show, empty, reach, reached
from protomodels_cli.spec.corpus import DataSpec
from protomodels_cli.spec.schema import RunSpec

KEPT_EVERY = 64 << 20  # bytes of text after which what there is is kept


class Tokenised:
    """The tokens that `spec` asks for, in the folder `work`."""

    def __init__(self, work: Path, spec: RunSpec, base: Path, files: list[Input], val_files: list[Input], show: Show):
        self.work, self.spec, self.show = work, spec, show
        self.inputs = {"files": files, "val_files": val_files}
        self.data: DataSpec
        self.tokenizer: Tokenizer
        self._at: str  # which of the two is being read
        found = reached(work)
        if found is None or not self._go_on(found):
            empty(work)
            self._begin(base)

    def make(self) -> dict[str, Any]:
        """All of it; what a manifest says of it."""
        for name, inputs in self.inputs.items():
            if name == self._at:
                self._write_all(inputs)
                self._at, self._place = "val_files", Place()
                if name == "files" and self.inputs["val_files"]:
                    self._keep()
        shards = self._train.close(), self._held_out.close()
        if not self.inputs["val_files"]:
            shards = _at_least(self.data.val_fraction, *shards, self.work)
        train, held_out = ([s.to_json() for s in part] for part in shards)
        return {
            "tokenizer": self.spec.tokenizer.kind,
            "tokenizer_sha256": self.tokenizer.sha256(),
            "revision": self.data.revision,
            "train": train,
            "held_out": held_out,
        }

    def _begin(self, base: Path) -> None:
        self._index, self._at, self._place, self.data = 0, "files", Place(), self.spec.data
        if self.data.source == "hf" and self.inputs["files"][0].path is None:
            from protomodels_cli.data.hub import commit_of

            self.data = self.data.model_copy(update={"revision": commit_of(self.data)})
        sample = _sample(self.data, self.inputs["files"])
        if self.spec.tokenizer.kind == "bpe":
            self.show("learning", 0, None)
        self.tokenizer = make_tokenizer(self.spec.tokenizer, base, (piece.text for piece in sample))
        if (ids := self.tokenizer.vocab_size) > self.spec.vocab_size:
            raise DataError(
                f"the tokenizer has {ids} ids, and tokenizer.vocab_size is {self.spec.vocab_size}",
                f"set tokenizer.vocab_size to {ids}, or remove the field",
                "vocabulary",
            )
        self.tokenizer.save(self.work)
        self._open_shards({})
        self._keep()

    def _go_on(self, found: dict[str, Any]) -> bool:
        """From what was kept, if it is whole."""
        try:
            self._index, self._at, self._place = found["index"], found["at"], Place(*found["place"])
            self.data = self.spec.data.model_copy(update={"revision": found["revision"]})
            self.tokenizer = self._kept_tokenizer()
            self._open_shards(found)
            self._kept = self._place
            return self.tokenizer.sha256() == found["tokenizer_sha256"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, DataError):
            return False

    def _kept_tokenizer(self) -> Tokenizer:
        if self.spec.tokenizer.kind == "bytes":
            return Bytes()
        return Json((self.work / "tokenizer.json").read_text(encoding="utf-8"))

    def _open_shards(self, found: dict[str, Any]) -> None:
        dtype = "<u2" if self.spec.vocab_size <= 1 << 16 else "<u4"
        self._train, self._held_out = (
            ShardWriter(self.work, name, dtype, found.get(name)) for name in ("train", "held_out")
        )

    def _keep(self) -> None:
        state = {"index": self._index, "at": self._at, "place": self._place, "revision": self.data.revision}
        state |= {"tokenizer_sha256": self.tokenizer.sha256()}
        reach(self.work, state | {"train": self._train.sync(), "held_out": self._held_out.sync()})
        self._kept = self._place

    def _write_all(self, inputs: list[Input]) -> None:
        chooser = counter.subseed(0, "held out")  # not the run's seed: runs to compare share their held-out text
        limit = int(self.data.val_fraction * 2**64)
        sizes = [0, *np.cumsum([one.size() for one in inputs]).tolist()]
        most = self.data.max_bytes
        source = pieces(self.data, inputs, self._place)
        for group, ids, lengths in encoded(self.tokenizer, source, self.work, processes()):
            if self._at == "val_files":
                self._held_out.write(ids)
            elif self.inputs["val_files"]:
                self._train.write(ids)
            else:
                drawn = range(self._index, self._index + len(group))
                held = np.repeat([counter.word(chooser, index) < limit for index in drawn], lengths)
                self._train.write(ids[~held])
                self._held_out.write(ids[held])
            self._index, self._place = self._index + len(group), group[-1].after
            if self._place.bytes - self._kept.bytes >= KEPT_EVERY:
                self._keep()
            if most is not None and most < sizes[-1]:
                self.show("tokenising", self._place.bytes, most)
            elif sizes[-1]:
                self.show("tokenising", sizes[self._place.inputs] + group[-1].position, sizes[-1])
            else:
                self.show("tokenising", self._place.bytes, None)


def _sample(data: DataSpec, inputs: list[Input]) -> Iterator[Piece]:
    """What a vocabulary is learned from: all text, or where there is more than 16 MiB the beginning of every input, in
    proportion to their sizes on disk. How much text a compressed one has is not known before it is read."""
    sizes = [one.size() for one in inputs]
    total = min(sum(sizes), data.max_bytes or sum(sizes))
    most = sum(sizes) if not any(one.is_packed() for one in inputs) else float("inf")
    if total == 0 or min(most, data.max_bytes or most) <= BPE_SAMPLE_BYTES:
        yield from pieces(data, inputs)
        return
    before, due = 0, 0.0
    for one, size in zip(inputs, sizes, strict=True):
        if before >= total:
            return
        before, due = before + size, due + min(size, total - before) * BPE_SAMPLE_BYTES / total
        if due > 0:  # a small input may have none of its own: then the next ones have more
            for piece in pieces(data, [one]):
                yield piece
                due -= len(piece.text)
                if due <= 0:
                    break


def _at_least(share: float, train: list[Shard], held_out: list[Shard], work: Path) -> tuple[list[Shard], list[Shard]]:
    """A small text has few pieces, and the draw may hold out too few: then the end of the rest is held out too."""
    tokens = [sum(s.tokens for s in part) for part in (train, held_out)]
    missing = int(share * sum(tokens)) - tokens[1]
    if missing <= share * sum(tokens) / 2:
        return train, held_out
    front, tail = split_tail(train, missing)
    front, tail = ([replace(s, sha256=hash_of(work / s.file, s)) for s in part] for part in (front, tail))
    return front, held_out + tail
