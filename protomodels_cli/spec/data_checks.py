"""Rules that tie fields of the data, its tokenizer and the store of snapshots together."""

from __future__ import annotations

import re

from protomodels_cli.spec.checking import Checks, Found
from protomodels_cli.spec.schema import RunSpec

check = Checks()


@check("data.source", "data.files", "data.val_files")
def files_match_source(s: RunSpec) -> Found:
    d = s.data
    reads_files = d.source not in ("builtin", "python", "hf")
    for name, files in (("files", d.files), ("val_files", d.val_files)):
        if not reads_files and files:
            yield (
                f"data.{name}",
                f"data.source is {d.source}, which reads no files",
                f"remove `{name}`, or set data.source to files",
            )
    if reads_files and not d.files:
        yield (
            "data.files",
            f"data.source is {d.source}, which needs files",
            "list paths or globs, as in `files: [corpus/*.txt]`",
        )


@check("data.source", "data.dataset", "data.config", "data.split", "data.val_split", "data.revision")
def dataset_matches_source(s: RunSpec) -> Found:
    d = s.data
    if d.source == "hf" and d.dataset is None:
        yield "data.dataset", "data.source is hf, which reads a dataset", "name a folder, or a dataset on the hub"
    if d.source == "hf" and d.val_split == d.split:
        yield (
            "data.val_split",
            f"data.split is {d.split} too, and training and held-out text must be disjoint",
            "name another split, or remove `val_split`: then data.val_fraction of the text is held out",
        )
    for name in ("dataset", "config", "val_split", "revision") if d.source != "hf" else ():
        if getattr(d, name) is not None:
            yield f"data.{name}", "belongs to data.source hf", f"remove `{name}`, or set data.source to hf"


@check("data.source", "tokenizer.kind", "tokenizer.vocab_size", "tokenizer.file")
def tokenizer_matches_source(s: RunSpec) -> Found:
    t = s.tokenizer
    if (s.data.source == "bin") != (t.kind == "none"):
        yield (
            "tokenizer.kind",
            "files of the source bin hold token ids and need tokenizer.kind none; other sources are text and need a "
            "tokenizer",
            "set tokenizer.kind to none" if s.data.source == "bin" else "set tokenizer.kind to bytes, bpe or file",
        )
    if t.kind == "none" and t.vocab_size is None:
        yield (
            "tokenizer.vocab_size",
            "is required for tokenizer.kind none: token ids do not say how large their vocabulary is",
            "set tokenizer.vocab_size (50257 for GPT-2's tokens)",
        )
    if t.kind == "bytes" and t.vocab_size not in (None, 256):
        yield "tokenizer.vocab_size", "tokenizer.kind bytes has 256 ids, one per byte", "remove `vocab_size`"
    if t.kind == "bpe" and t.vocab_size is not None and t.vocab_size < 257:
        yield (
            "tokenizer.vocab_size",
            "a byte-pair vocabulary starts with 256 bytes and one end-of-text token",
            "use 257 or more, or set tokenizer.kind to bytes",
        )
    if (t.kind == "file") != (t.file is not None):
        yield (
            "tokenizer.file",
            "tokenizer.file belongs to tokenizer.kind file, and to no other kind",
            "set tokenizer.file to the path of a tokenizer.json"
            if t.kind == "file"
            else "remove `file`, or set tokenizer.kind to file",
        )


@check("snapshots.copy_to")
def store_has_no_password(s: RunSpec) -> Found:
    if re.search(r"//[^/@]*:[^/@]*@", s.snapshots.copy_to or ""):
        yield (
            "snapshots.copy_to",
            "the URL contains a password, and the spec is sent to every peer",
            "remove the password from the URL, and set it in the coordinator's environment: FSSPEC_FTP_USERNAME and "
            "FSSPEC_FTP_PASSWORD for ftp",
        )
