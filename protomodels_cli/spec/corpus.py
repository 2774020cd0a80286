"""The sections of a spec that say what is trained on: `data` and `tokenizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protomodels_cli.spec.fields import Bytes, Section, Size


class DataSpec(Section):
    """What is trained on."""

    source: Literal["builtin", "text", "jsonl", "bin", "parquet"] = Field(
        "builtin",
        description=(
            "`builtin`: Python's own documentation and library sources. `bin`: token shards as nanoGPT "
            "(bare uint16) or modded-nanogpt (1 KiB header) write them."
        ),
    )
    files: list[str] = Field(default_factory=list, description="Paths or globs, relative to the spec file.")
    val_files: list[str] = Field(
        default_factory=list, description="Held-out files. Default: val_fraction of the text of `files`."
    )
    field: str = Field("text", description="jsonl, parquet: the field or column that holds the text.")
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02, description="Share of the text that is held out if val_files is empty."
    )
    max_bytes: Bytes | None = Field(None, description="Stop reading text after this many bytes.")
    sampling: Literal["epochs", "random"] = Field(
        "epochs",
        description="`epochs`: every window once per epoch, in a seeded order. `random`: windows from anywhere.",
    )
    cache_dir: str | None = Field(
        None, description="Folder of the token cache. Default: $PMTRAIN_CACHE or ~/.cache/pmtrain."
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
