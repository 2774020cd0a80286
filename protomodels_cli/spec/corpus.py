"""The sections of a spec that say what is trained on: `data` and `tokenizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protomodels_cli.spec.fields import Bytes, Section, Size


class DataSpec(Section):
    """What is trained on."""

    source: Literal["builtin", "python", "files", "text", "jsonl", "parquet", "bin", "hf"] = Field(
        "builtin",
        description=(
            "`builtin`: the State of the Union addresses, which come with pmtrain. `python`: Python's own "
            "documentation and library sources. `files`: the kind of each file follows from its name, and a folder "
            "means all text files below it. `bin`: token shards as nanoGPT (bare uint16) or modded-nanogpt (1 KiB "
            "header) write them. `hf`: whatever Hugging Face's `datasets` reads (pip install 'datasets>=4'). See "
            "[data.md](data.md)."
        ),
    )
    files: list[str] = Field(
        default_factory=list,
        description="Paths or globs, relative to the spec file. Text may be compressed: .gz, .xz, .bz2, .zst.",
    )
    val_files: list[str] = Field(
        default_factory=list, description="Held-out files. Default: val_fraction of the text of `files`."
    )
    field: str = Field("text", description="jsonl, parquet, hf: the field or column that holds the text.")
    dataset: str | None = Field(
        None, description="hf: a folder, relative to the spec file, or the name of a dataset on the hub."
    )
    config: str | None = Field(None, description="hf: the dataset's configuration, where it has several.")
    split: str = Field("train", description="hf: what is trained on.")
    val_split: str | None = Field(None, description="hf: what is held out. Default: val_fraction of `split`.")
    revision: str | None = Field(
        None, description="hf: branch, tag or commit on the hub. Default: the newest when it is first read."
    )
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02, description="Share of the text that is held out if there is no val_files or val_split."
    )
    max_bytes: Bytes | None = Field(None, description="Stop reading text after this many bytes.")
    sampling: Literal["epochs", "random"] = Field(
        "epochs",
        description="`epochs`: every window once per epoch, in a seeded order. `random`: windows from anywhere.",
    )
    cache_dir: str | None = Field(
        None,
        description="Folder of the token cache. Default: $PMTRAIN_CACHE, else pmtrain in $XDG_CACHE_HOME.",
    )


class TokenizerSpec(Section):
    kind: Literal["bytes", "bpe", "file", "none"] = Field(
        "bpe",
        description="`bytes`; `bpe` trained on the data; `file`: a tokenizer.json; `none` if the data are ids (bin).",
    )
    vocab_size: Size | None = Field(
        None,
        description="Default: 256 for bytes, 4096 for bpe, read from the file for `file`. Required for `none`.",
    )
    file: str | None = Field(None, description="The tokenizer.json, relative to the spec file.")
