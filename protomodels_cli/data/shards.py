"""Token shards on disk: written once, memory-mapped, listed in a manifest with their hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protomodels_cli.data.errors import DataError

SHARD_TOKENS = 1 << 26
_CHUNK = 1 << 22  # tokens looked at in one go

# modded-nanogpt's shards: 256 int32, of which the first three are this magic, version 1 and the token count.
HEADER_INTS, HEADER_MAGIC, HEADER_VERSION = 256, 20240520, 1


@dataclass(frozen=True)
class Shard:
    """A run of tokens inside a file."""

    file: str
    dtype: str
    offset: int  # bytes
    tokens: int
    sha256: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class TokenStream:
    """Shards end to end, as one long array that is never in memory."""

    def __init__(self, shards: list[Shard], folder: Path):
        self.shards = shards
        self._maps = [
            np.memmap(folder / s.file, dtype=np.dtype(s.dtype), mode="r", offset=s.offset, shape=(s.tokens,))
            for s in shards
            if s.tokens
        ]
        self._ends = np.cumsum([len(m) for m in self._maps])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start … start+count, across shard ends, as int64."""
        if start < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        begin = start - (int(self._ends[shard - 1]) if shard else 0)
        while count:
            part = self._maps[shard][begin : begin + count]
            parts.append(np.asarray(part, dtype=np.int64))
            count -= len(part)
            shard, begin = shard + 1, 0
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


class ShardWriter:
    """Appends tokens to NAME-00000.bin, NAME-00001.bin, … below a folder."""

    def __init__(self, folder: Path, name: str, dtype: str, reached: dict[str, Any] | None = None):
        """`reached`: where a writer of the same tokens got to, as `sync` said it."""
        self.folder, self.name, self.dtype = folder, name, np.dtype(dtype).newbyteorder("<")
        self.shards: list[Shard] = []
        self._file: Any = None
        self._tokens = 0
        if reached is not None:
            self.shards = [Shard(**s) for s in reached["shards"]]
            if reached["tokens"]:
                self._continue(reached["tokens"], reached["sha256"])

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self._file is None:
                self._file, self._digest, self._tokens = self._path().open("wb"), hashlib.sha256(), 0
            part = ids[: SHARD_TOKENS - self._tokens]
            data = part.astype(self.dtype).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == SHARD_TOKENS:
                self._finish()

    def sync(self) -> dict[str, Any]:
        """What there is now, once it is on disk."""
        reached = {"shards": [s.to_json() for s in self.shards], "tokens": 0, "sha256": ""}
        if self._file is None:
            return reached
        self._file.flush()
        os.fsync(self._file.fileno())
        return reached | {"tokens": self._tokens, "sha256": self._digest.hexdigest()}

    def close(self) -> list[Shard]:
        if self._file is not None:
            self._finish()
        return self.shards

    def _continue(self, tokens: int, sha256: str) -> None:
        self._file, self._digest, self._tokens = self._path().open("r+b"), hashlib.sha256(), tokens
        self._file.truncate(tokens * self.dtype.itemsize)
        while data := self._file.read(_CHUNK):
            self._digest.update(data)
        if self._digest.hexdigest() != sha256:
            self._file.close()
            raise ValueError(f"{self._path()} does not hold what it held when it was last written")

    def _path(self) -> Path:
        return self.folder / f"{self.name}-{len(self.shards):05d}.bin"

    def _finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        name = str(self.dtype.newbyteorder("<").str)
        self.shards.append(Shard(self._path().name, name, 0, self._tokens, self._digest.hexdigest()))


def hash_of(path: Path, shard: Shard) -> str:
    digest = hashlib.sha256()
    for part in _parts(path, shard):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def external_shard(path: Path, vocab_size: int) -> Shard:
    """A nanoGPT or modded-nanogpt .bin file, used where it lies. Checks every id once."""
    size = path.stat().st_size
    head = np.fromfile(path, dtype="<i4", count=3)
    offset, tokens = 0, size // 2
    if len(head) == 3 and head[0] == HEADER_MAGIC:
        offset, tokens = HEADER_INTS * 4, int(head[2])
        if head[1] != HEADER_VERSION or offset + 2 * tokens != size:
            raise DataError(
                f"{path}: the header says version {head[1]} and {tokens} tokens, and the file has {size} bytes",
                f"write the shard again, with version {HEADER_VERSION} and {offset} + 2 × tokens bytes",
                "shard_header",
            )
    elif size % 2:
        what = f"{path} has {size} bytes, which is not a whole number of 2-byte tokens"
        raise DataError(what, "write the tokens as uint16", "shard_size")
    shard = Shard(str(path.resolve()), "<u2", offset, tokens)
    digest = hashlib.sha256()
    for part in _parts(path, shard):
        if len(part) and (top := int(part.max())) >= vocab_size:
            raise DataError(
                f"{path} has token id {top}, and tokenizer.vocab_size is {vocab_size}",
                f"set tokenizer.vocab_size to {top + 1} or more",
                "vocabulary",
            )
        digest.update(np.ascontiguousarray(part).data)
    return Shard(shard.file, shard.dtype, offset, tokens, digest.hexdigest())


def _parts(path: Path, shard: Shard) -> Iterator[np.ndarray]:
    if shard.tokens == 0:
        return
    tokens = np.memmap(path, dtype=np.dtype(shard.dtype), mode="r", offset=shard.offset, shape=(shard.tokens,))
    for start in range(0, shard.tokens, _CHUNK):
        yield np.asarray(tokens[start : start + _CHUNK])


def split_tail(shards: list[Shard], tail: int) -> tuple[list[Shard], list[Shard]]:
    """The shards without their last `tail` tokens, and those tokens."""
    front: list[Shard] = []
    back: list[Shard] = []
    left = sum(s.tokens for s in shards) - tail
    for s in shards:
        here = max(0, min(left, s.tokens))
        left -= here
        width = np.dtype(s.dtype).itemsize
        if here:
            front.append(Shard(s.file, s.dtype, s.offset, here, s.sha256))
        if here < s.tokens:
            back.append(Shard(s.file, s.dtype, s.offset + here * width, s.tokens - here, s.sha256))
    return front, back
