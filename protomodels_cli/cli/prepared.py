"""A run's tokens, for the commands that train: with a word about what is done and what was left out."""

from __future__ import annotations

from pathlib import Path

from protomodels_cli.data.prepare import Corpus, prepare
from protomodels_cli.observe.bytes_done import BytesDone
from protomodels_cli.quantities import plural
from protomodels_cli.spec.schema import RunSpec


def prepared(spec: RunSpec, base: Path, apart: bool = False) -> Corpus:
    print(f"preparing the {spec.data.source} data …", flush=True)
    with BytesDone() as show:
        corpus = prepare(spec, base, apart, show)
    if corpus.skipped:
        print(left_out(corpus.skipped), flush=True)
    return corpus


def left_out(binary: list[Path]) -> str:
    return f"left out {plural(len(binary), 'binary file')}, such as {binary[0]}"
