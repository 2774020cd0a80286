"""From a spec's data section to two disjoint token streams, tokenised once and cached."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from protomodels_cli import counter
from protomodels_cli.data.errors import DataError, unreadable
from protomodels_cli.data.shards import Shard, ShardWriter, TokenStream, external_shard, hash_of, split_tail
from protomodels_cli.data.sources import Piece, pieces, source_files
from protomodels_cli.data.tokenizers import Bytes, Json, Tokenizer, make_tokenizer
from protomodels_cli.files import user_cache, write_whole
from protomodels_cli.spec.schema import RunSpec

FORMAT = 1
HASHED = "hashed.json"
_ENCODE_AT_ONCE = 256


@dataclass(frozen=True)
class Corpus:
    """Train and held-out tokens, and what made them."""

    train: TokenStream
    held_out: TokenStream
    manifest: dict[str, Any]
    folder: Path

    @property
    def sha256(self) -> str:
        return str(self.manifest["sha256"])

    def tokenizer(self) -> Tokenizer | None:
        """None where the data came as ids."""
        match self.manifest["tokenizer"]:
            case "none":
                return None
            case "bytes":
                return Bytes()
            case _:
                return Json((self.folder / "tokenizer.json").read_text(encoding="utf-8"))


def cache_folder(spec: RunSpec, base: Path) -> Path:
    return user_cache() if spec.data.cache_dir is None else base / spec.data.cache_dir


def prepare(spec: RunSpec, base: Path = Path(), apart: bool = False) -> Corpus:
    """The spec's corpus, from the cache or made now. `base` is the folder of the spec file.

    `apart`: in a process of its own, since training a tokenizer takes memory that this one would keep."""
    files, val_files = _sources(spec, base)
    if val_files and (overlap := {f.resolve() for f in files} & {f.resolve() for f in val_files}):
        raise DataError(
            f"data.val_files: {min(overlap)} is also in data.files",
            "remove the file from one of the two lists: training and held-out text must be disjoint",
            "overlap",
        )
    folder = cache_folder(spec, base) / _key(spec, base, files, val_files)
    corpus = _open(folder)
    if corpus is None:
        try:
            (_make_apart if apart else _make)(folder, spec, base, files, val_files)
        except OSError as e:
            raise DataError(
                f"the token cache {folder.parent} cannot be written: {e.strerror}",
                "free space there, or set data.cache_dir to another folder",
                "cache_unwritable",
            ) from None
        corpus = _open(folder)
        if corpus is None:
            raise DataError(
                f"the token cache just written to {folder} is damaged (hash mismatch)",
                "check the disk, or set data.cache_dir to a folder on another disk",
                "cache_damaged",
            )
    for name, stream, share in (
        ("training", corpus.train, "lower data.val_fraction"),
        ("held-out", corpus.held_out, "raise data.val_fraction"),
    ):
        if len(stream) < spec.model.context + 1:
            raise DataError(
                f"the {name} text has {len(stream)} tokens, and one window needs {spec.model.context + 1}",
                f"add text, {share}, or lower model.context",
                "too_short",
            )
    return corpus


def cached(spec: RunSpec, base: Path) -> Corpus | None:
    """The spec's corpus, if it is in the cache."""
    return _open(cache_folder(spec, base) / _key(spec, base, *_sources(spec, base)))


def _sources(spec: RunSpec, base: Path) -> tuple[list[Path], list[Path]]:
    return source_files(spec.data, "files", base), source_files(spec.data, "val_files", base)


def _make_apart(*arguments: Any) -> None:
    # Here, so that a coordinator that comes back does not wait for modules it does not need.
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    interrupted = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C goes to both processes; this one answers it
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, interrupted) as apart:
        try:
            apart.submit(_make, *arguments).result()
        except BrokenProcessPool:
            raise DataError(
                "the process that tokenises the text was killed, perhaps because memory ran out",
                "free memory, or copy the token cache (data.cache_dir) from a larger machine",
                "killed",
            ) from None


def _key(spec: RunSpec, base: Path, files: list[Path], val_files: list[Path]) -> str:
    """A name for these tokens: different wherever the tokens could differ."""

    def stamp(path: Path) -> list[Any]:
        stat = path.stat()
        return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]

    tokenizer_file = (
        stamp(base / spec.tokenizer.file) if spec.tokenizer.file and (base / spec.tokenizer.file).exists() else None
    )
    identity = {
        "format": FORMAT,
        "data": spec.data.model_dump(mode="json", exclude={"sampling", "cache_dir", "files", "val_files"}),
        "tokenizer": spec.tokenizer.model_dump(mode="json"),
        "tokenizer_file": tokenizer_file,
        "files": [stamp(f) for f in files],
        "val_files": [stamp(f) for f in val_files],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def _open(folder: Path) -> Corpus | None:
    """The corpus in a cache folder, if complete: every shard of ours has the right hash, or is unchanged since the
    hash was last checked."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        train, held_out = ([Shard(**s) for s in manifest[part]] for part in ("train", "held_out"))
        if manifest["tokenizer"] in ("bpe", "file"):
            tokenizer = (folder / "tokenizer.json").read_bytes()
            if hashlib.sha256(tokenizer).hexdigest() != manifest["tokenizer_sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    hashed = _hashed(folder)
    stamps = {}
    for shard in (*train, *held_out):
        path = folder / shard.file
        size = shard.offset + shard.tokens * np.dtype(shard.dtype).itemsize
        if not path.exists() or path.stat().st_size < size:
            return None
        if path.parent == folder:
            name = f"{shard.file} {shard.offset} {shard.sha256}"  # one file may hold the tokens of two shards
            stamps[name] = _stamp(path)  # before its bytes are read
            if hashed.get(name) != stamps[name] and hash_of(path, shard) != shard.sha256:
                return None
    if stamps != hashed:
        with contextlib.suppress(OSError):  # a cache that we may not write is hashed every time
            write_whole(folder / HASHED, json.dumps(stamps).encode())
    return Corpus(TokenStream(train, folder), TokenStream(held_out, folder), manifest, folder)


def _hashed(folder: Path) -> dict[str, list[int]]:
    """The stamp that each shard had when its hash was last checked."""
    try:
        found = json.loads((folder / HASHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(path: Path) -> list[int]:
    """Different after every write, even if the modification time is set back."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _make(folder: Path, spec: RunSpec, base: Path, files: list[Path], val_files: list[Path]) -> None:
    """Write the shards to a folder beside `folder`, then rename that: a cache is complete or not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        if spec.data.source == "bin":
            manifest = _make_from_bins(spec, files, val_files)
        else:
            manifest = _make_from_text(work, spec, base, files, val_files)
        hashes = [[s["tokens"], s["offset"], s["sha256"]] for part in ("train", "held_out") for s in manifest[part]]
        manifest["sha256"] = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists() and _open(folder) is None:  # damaged
            shutil.rmtree(folder)
        try:
            os.rename(work, folder)
        except OSError:
            if _open(folder) is None:  # otherwise another process made the same meanwhile
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_from_bins(spec: RunSpec, files: list[Path], val_files: list[Path]) -> dict[str, Any]:
    train, held_out = ([_external(f, spec.vocab_size) for f in part] for part in (files, val_files))
    if not val_files:
        train, held_out = split_tail(train, int(sum(s.tokens for s in train) * spec.data.val_fraction))
    return _manifest(spec, "none", "none", train, held_out)


def _external(path: Path, vocab_size: int) -> Shard:
    try:
        return external_shard(path, vocab_size)
    except OSError as e:
        raise unreadable(path, e) from None


def _make_from_text(work: Path, spec: RunSpec, base: Path, files: list[Path], val_files: list[Path]) -> dict[str, Any]:
    texts = (p.text for p in pieces(spec.data, files))
    tokenizer = make_tokenizer(spec.tokenizer, base, texts)
    if tokenizer.vocab_size > spec.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids, and tokenizer.vocab_size is {spec.vocab_size}",
            f"set tokenizer.vocab_size to {tokenizer.vocab_size}, or remove the field",
            "vocabulary",
        )
    tokenizer.save(work)
    dtype = "<u2" if spec.vocab_size <= 1 << 16 else "<u4"
    train, held_out = ShardWriter(work, "train", dtype), ShardWriter(work, "held_out", dtype)
    chooser = counter.subseed(0, "held out")  # not the run's seed: runs to compare share their held-out text
    limit = int(spec.data.val_fraction * 2**64)
    for index, (ids, piece) in enumerate(_encoded(tokenizer, pieces(spec.data, files))):
        held = not val_files and counter.word(chooser, index) < limit
        _write(held_out if held else train, ids, piece, tokenizer)
    for ids, piece in _encoded(tokenizer, pieces(spec.data, val_files)):
        _write(held_out, ids, piece, tokenizer)
    shards = train.close(), held_out.close()
    if not val_files:
        shards = _at_least(spec.data.val_fraction, *shards, work)
    return _manifest(spec, spec.tokenizer.kind, tokenizer.sha256(), *shards)


def _at_least(share: float, train: list[Shard], held_out: list[Shard], work: Path) -> tuple[list[Shard], list[Shard]]:
    """A small text has few pieces, and the draw may hold out too few: then the end of the rest is held out too."""
    tokens = [sum(s.tokens for s in part) for part in (train, held_out)]
    missing = int(share * sum(tokens)) - tokens[1]
    if missing <= share * sum(tokens) / 2:
        return train, held_out
    front, tail = split_tail(train, missing)
    front, tail = ([replace(s, sha256=hash_of(work / s.file, s)) for s in part] for part in (front, tail))
    return front, held_out + tail


def _write(writer: ShardWriter, ids: np.ndarray, piece: Piece, tokenizer: Tokenizer) -> None:
    writer.write(ids)
    if piece.ends and tokenizer.end_id is not None:
        writer.write(np.array([tokenizer.end_id]))


def _encoded(tokenizer: Tokenizer, source: Iterator[Piece]) -> Iterator[tuple[np.ndarray, Piece]]:
    while group := list(itertools.islice(source, _ENCODE_AT_ONCE)):
        yield from zip(tokenizer.encode([p.text for p in group]), group, strict=True)


def _manifest(
    spec: RunSpec, kind: str, tokenizer_sha256: str, train: list[Shard], held_out: list[Shard]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": spec.data.source,
        "tokenizer": kind,
        "tokenizer_sha256": tokenizer_sha256,
        "vocab_size": spec.vocab_size,
        "train": [s.to_json() for s in train],
        "held_out": [s.to_json() for s in held_out],
    }
