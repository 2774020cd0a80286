"""How the refusals of an export read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exporting import save_run

from protomodels_cli.errors import UserError
from protomodels_cli.export.out import check_free, not_written
from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import _converted, export


def said(do: Callable[[], object]) -> list[str]:
    with pytest.raises(UserError) as refused:
        do()
    assert refused.value.kind
    return str(refused.value).split("\n    fix:  ")


def exported(run: Path, step: int | None = None) -> None:
    with open_source(run, step) as source:
        export(source, run.parent / "out")


FIRST_SAVED = [
    ({"interval": 7}, "after step 7"),
    ({"every": "20min"}, "after 20min"),
    ({"interval": 7, "every": "20min"}, "after step 7 or after 20min"),
    ({"interval": 0}, "at the end of the run (snapshots.interval is 0)"),
]


def test_snapshots(tmp_path):
    run = tmp_path / "run"
    save_run(run, 0)
    assert said(lambda: exported(run)) == [
        f"nothing was saved yet: {run} has no complete snapshot",
        "export again when there is one; the first is saved 1 min or one step after the beginning, whichever is longer",
    ]
    for i, (snapshots, when) in enumerate(FIRST_SAVED):
        save_run(tmp_path / f"run-{i}", 0, snapshots=snapshots)
        fix = said(lambda i=i: exported(tmp_path / f"run-{i}"))[1]
        assert fix == f"export again when there is one; the first is saved {when}"
    run = tmp_path / "saved"
    save_run(run, 2, snapshots={"interval": 0})
    assert said(lambda: exported(run, 7)) == [
        f"--step 7: {run} has no complete snapshot of that step",
        "use one of 1, 2, or leave out --step for the newest",
    ]
    part = run / "snapshots" / "0001-00000002" / "stage-1.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    other = "export another snapshot with --step 1, or the copy in the store that snapshots.copy_to names"
    assert said(lambda: exported(run)) == [f"{part} is damaged (hash mismatch)", other]
    part.write_bytes(content[:2000])
    assert said(lambda: exported(run))[0].startswith(f"{part} is damaged: ")
    part.unlink()
    assert said(lambda: exported(run)) == [f"{part} is missing", other]
    part.mkdir()
    part.joinpath("x").mkdir()
    assert said(lambda: exported(run))[0].startswith(f"{part} cannot be read: ")


def test_a_tokenizer_that_is_gone(tmp_path):
    save_run(tmp_path / "run", 1, tokenizer={"kind": "bpe", "vocab_size": 300})
    (tmp_path / "run" / "tokenizer.json").write_text("{")
    assert said(lambda: exported(tmp_path / "run")) == [
        f"{tmp_path}/run/tokenizer.json is missing or damaged",
        "put the tokenizer.json that the run was tokenised with there; the token cache has it",
    ]


def test_writing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    full = not_written(Path("out"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert str(full) == (
        "cannot write out: No space left on device\n    fix:  free some space there, or choose a folder on another disk"
    )
    failed = not_written(Path("out"), OSError(errno.EIO, os.strerror(errno.EIO)))
    assert str(failed) == (
        "cannot write out: Input/output error\n    fix:  check that disk, or choose a folder on another one"
    )
    elsewhere = not_written(Path("out"), OSError(errno.EXDEV, os.strerror(errno.EXDEV)))
    assert str(elsewhere) == (
        "cannot write out: Invalid cross-device link\n    fix:  choose a new folder in it, for example out/model"
    )
    assert said(lambda: check_free(Path())) == [
        ". is the folder you are in: the finished model cannot take its place",
        "choose a new folder in it, for example model",
    ]
    large = torch.tensor([1.0, -123456.0])
    assert said(lambda: _converted(large, "lm_head.weight", "float16")) == [
        "--dtype float16: lm_head.weight has numbers up to 123,456, and float16 ends at 65,504",
        "use --dtype bfloat16, or leave out --dtype",
    ]
