"""From a spec's data section to two disjoint token streams, tokenised once and cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from protomodels_cli.data.compressed import compression
from protomodels_cli.data.errors import DataError, Outage, unreadable
from protomodels_cli.data.file_facts import FileFacts, stamp
from protomodels_cli.data.shards import Shard, TokenStream, external_shard, hash_of, split_tail
from protomodels_cli.data.sources import Input, below, source_files
from protomodels_cli.data.tokenise import Tokenised
from protomodels_cli.data.tokenizers import Bytes, Json, Tokenizer
from protomodels_cli.data.work import Show, empty, finish, in_silence, workshop
from protomodels_cli.files import user_cache, write_whole
from protomodels_cli.spec.corpus import DataSpec
from protomodels_cli.spec.schema import RunSpec

FORMAT = 2
HASHED = "hashed.json"


@dataclass(frozen=True)
class Corpus:
    """Train and held-out tokens, and what made them."""

    train: TokenStream
    held_out: TokenStream
    manifest: dict[str, Any]
    folder: Path
    skipped: list[Path] = field(default_factory=list)  # files that are no text

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


def prepare(spec: RunSpec, base: Path = Path(), apart: bool = False, show: Show = in_silence) -> Corpus:
    """The spec's corpus, from the cache or made now. `base` is the folder of the spec file.

    `apart`: in a process of its own, since training a tokenizer takes memory that this one would keep."""
    cache, facts = cache_folder(spec, base), _facts(spec, base)
    files, val_files = _inputs(spec, base, facts)
    if overlap := _paths(files) & _paths(val_files):
        raise DataError(
            f"data.val_files: {min(overlap)} is also in data.files",
            "remove the file from one of the two lists: training and held-out text must be disjoint",
            "overlap",
        )
    folder = cache / _key(spec, base, files, val_files, facts, show)
    facts.save()
    corpus = _open(folder)
    if corpus is None:
        try:
            (_make_apart if apart else _make)(folder, spec, base, files, val_files, facts.stamps(), show)
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
    return replace(corpus, skipped=facts.binary)


def _names(data: DataSpec) -> list[str]:
    return [data.source, *data.files, "", *data.val_files, data.dataset or ""]


def _paths(inputs: list[Input]) -> set[Path]:
    return {one.path.resolve() for one in inputs if one.path is not None and one.kind != "hf"}


def _facts(spec: RunSpec, base: Path) -> FileFacts:
    name = _hash([str(base.resolve()), *_names(spec.data)])
    return FileFacts(cache_folder(spec, base) / "files" / f"{name}.json")


def _inputs(spec: RunSpec, base: Path, facts: FileFacts) -> tuple[list[Input], list[Input]]:
    return (
        source_files(spec.data, "files", base, facts.is_binary),
        source_files(spec.data, "val_files", base, facts.is_binary),
    )


def cached(spec: RunSpec, base: Path) -> Corpus | None:
    """The spec's corpus, if it is in the cache."""
    facts = _facts(spec, base)
    files, val_files = _inputs(spec, base, facts)
    return _open(cache_folder(spec, base) / _key(spec, base, files, val_files, facts, in_silence))


def _make_apart(*arguments: Any) -> None:
    # Here, so that a coordinator that comes back does not wait for modules it does not need.
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    from protomodels_cli.data.encoding import killed

    # What ends with this process has semaphores, which Python's tracker removes then, with a warning that helps nobody.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    interrupted = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C goes to both processes; this one answers it
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, interrupted) as apart:
        try:
            apart.submit(_make, *arguments).result()
        except BrokenProcessPool:
            raise killed() from None


def _key(spec: RunSpec, base: Path, files: list[Input], val_files: list[Input], facts: FileFacts, show: Show) -> str:
    """A name for these tokens: different wherever the tokens could differ, and the same wherever the files lie."""

    def hashes(paths: list[Path]) -> list[str]:
        return facts.sha256(paths, lambda done, total: show("hashing", done, total))

    def identity(inputs: list[Input]) -> list[Any]:
        if inputs and inputs[0].kind == "bin":  # used where they lie
            return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in _all(inputs)]
        if inputs and inputs[0].kind == "hf":
            return [one.split for one in inputs]
        paths = _all(inputs)
        return [
            [one.kind, compression(path), sha256]
            for one, path, sha256 in zip(inputs, paths, hashes(paths), strict=True)
        ]

    out = {"source", "sampling", "cache_dir", "files", "val_files"}
    dataset: Any = None
    if files and files[0].kind == "hf" and (folder := files[0].path) is not None:
        out.add("dataset")
        found = below(folder)
        dataset = [[str(path.relative_to(folder)), sha256] for path, sha256 in zip(found, hashes(found), strict=True)]
    tokenizer = base / spec.tokenizer.file if spec.tokenizer.file else None
    return _hash(
        {
            "format": FORMAT,
            "data": spec.data.model_dump(mode="json", exclude=out),
            "tokenizer": spec.tokenizer.model_dump(mode="json", exclude={"file"}),
            "tokenizer_file": hashes([tokenizer]) if tokenizer is not None and tokenizer.exists() else None,
            "files": identity(files),
            "val_files": identity(val_files),
            "dataset": dataset,
        }
    )


def _all(inputs: list[Input]) -> list[Path]:
    return [one.path for one in inputs if one.path is not None]


def _hash(identity: Any) -> str:
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
            stamps[name] = stamp(path)  # before its bytes are read
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


def _make(
    folder: Path,
    spec: RunSpec,
    base: Path,
    files: list[Input],
    val_files: list[Input],
    stamps: dict[Path, list[int]],
    show: Show,
) -> None:
    """Write the shards to a folder beside `folder`, then rename that: a cache is complete or not there."""
    with workshop(folder, show) as work:
        if _open(folder) is not None:  # another process made it meanwhile
            empty(work)
            work.rmdir()
            return
        try:
            if spec.data.source == "bin":
                manifest = _from_bins(spec, _all(files), _all(val_files))
            else:
                manifest = Tokenised(work, spec, base, files, val_files, show).make()
            if changed := next((path for path, before in stamps.items() if _changed(path, before)), None):
                raise DataError(f"{changed} changed while it was read", "start again", "changed")
        except Outage:
            raise
        except DataError:  # which going on would meet again
            empty(work)
            work.rmdir()
            raise
        manifest |= {"format": FORMAT, "source": spec.data.source, "vocab_size": spec.vocab_size}
        hashes = [[s["tokens"], s["offset"], s["sha256"]] for part in ("train", "held_out") for s in manifest[part]]
        manifest["sha256"] = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        finish(work, folder)


def _changed(path: Path, before: list[int]) -> bool:
    try:
        return stamp(path) != before
    except FileNotFoundError:
        return True
    except OSError as e:
        raise unreadable(path, e) from None


def _from_bins(spec: RunSpec, files: list[Path], val_files: list[Path]) -> dict[str, Any]:
    train, held_out = ([_external(f, spec.vocab_size) for f in part] for part in (files, val_files))
    if not val_files:
        train, held_out = split_tail(train, int(sum(s.tokens for s in train) * spec.data.val_fraction))
    shards = {"train": [s.to_json() for s in train], "held_out": [s.to_json() for s in held_out]}
    return {"tokenizer": "none", "tokenizer_sha256": "none", **shards}


def _external(path: Path, vocab_size: int) -> Shard:
    try:
        return external_shard(path, vocab_size)
    except OSError as e:
        raise unreadable(path, e) from None
