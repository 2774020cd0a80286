"""How generating and evaluating read: what is refused, and what is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import save_reference
from random_models import TEXT, make_model, make_tokenizer, save
from typer.testing import CliRunner

from protomodels_cli.cli.checks import enough_memory
from protomodels_cli.cli.main import app
from protomodels_cli.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save(make_model("llama"), tmp_path / "model", make_tokenizer())


def said(*arguments: Any) -> list[str]:
    error = CliRunner().invoke(app, [*map(str, arguments)]).exception
    assert isinstance(error, UserError), error
    return str(error).split("\n    fix:  ")


@pytest.mark.full
def test_models(folder):
    (folder.parent / "empty").mkdir()
    assert said("generate", "empty") == [
        "empty is neither a run directory nor a folder with a model (config.json is not there)",
        "name a run directory, or a folder that `pmtrain export` has written",
    ]
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({**json.loads(config), "mlp_bias": True}))
    assert said("generate", "model") == [
        "the model in model cannot be used: config.json has mlp_bias = true, and there are no biases here",
        "use an exported run, or another plain Llama or Qwen3",
    ]
    (folder / "config.json").write_text("{")
    what, fix = said("generate", "model")
    assert what.startswith("model/config.json cannot be read: ")
    assert fix == "export the run again, or fetch the file again"
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_bytes(b"\xff")
    assert said("generate", "model") == ["model/tokenizer.json cannot be read: it is not UTF-8", fix]


def test_generating(folder):
    assert said("generate", "model", "--prompt", "cat" * 99)[1] == "shorten the prompt to fewer than 64 tokens"
    done = CliRunner().invoke(app, ["generate", "model", "--prompt", "The", "--seed", "7"])
    stopped, summary = done.stderr.splitlines()
    assert stopped == "stopped: the model's context of 64 tokens is full"
    assert re.fullmatch(r"\d+ tokens, \S+ tok/s, seed 7", summary)
    (folder / "tokenizer.json").unlink()
    assert said("generate", "model", "--prompt", "x") == [
        "model has no tokenizer: this model was trained on ids",
        "put the tokenizer.json that made the ids into an exported folder",
    ]


def test_evaluating(folder, tmp_path):
    assert said("eval", "model") == [
        "an exported folder has no text of its own",
        "name one with --data, or name the run directory in place of the folder",
    ]
    assert said("eval", "model", "--data", "none.txt") == [
        "--data none.txt: there is no text",
        "check the path or the pattern",
    ]
    (tmp_path / "a.txt.gz").write_bytes(b"no gzip")
    assert said("eval", "model", "--data", "a.txt.gz")[1] == "compress the file again"
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\0")
    assert said("eval", "model", "--data", "pictures") == [
        "--data pictures: there are only binary files",
        "name text, or files of ids (.bin)",
    ]
    assert said("eval", "model", "--data", "hf:news,part=test") == [
        "--data hf:news,part=test: this is no dataset",
        "write hf:DATASET, and where it needs them config=…, split=…, revision=… after commas",
    ]
    (tmp_path / "a.txt").write_text(TEXT)
    assert said("eval", "model", "--data", "a.txt", "--context", 65) == [
        "--context 65: the model's context is 64",
        "use 64 or less",
    ]
    done = CliRunner().invoke(app, ["eval", "model", "--data", "a.txt"])
    figures = re.sub(r"\d+([.,]\d+)*k?", "#", done.stdout).splitlines()
    assert figures == [
        "loss # nats per token, perplexity #, # bits per byte",
        "# tokens (# KiB of text) in # windows, # tok/s",
    ]
    (tmp_path / "empty.txt").write_text("")
    assert said("eval", "model", "--data", "empty.txt")[0] == "there is nothing to predict in this data"
    (folder / "tokenizer.json").unlink()
    assert said("eval", "model", "--data", "a.txt") == [
        "a.txt is text, and this model has no tokenizer: it was trained on ids",
        "name files of ids (.bin) with --data",
    ]
    np.arange(200, dtype="<u2").tofile(tmp_path / "ids.bin")
    done = CliRunner().invoke(app, ["eval", "model", "--data", "ids.bin"])
    assert re.sub(r"\d+([.,]\d+)*k?", "#", done.stdout).splitlines() == [
        "loss # nats per token, perplexity #",
        "# tokens in # windows, # tok/s",
    ]


def test_data_of_a_run(tmp_path):
    save_reference(tmp_path / "run", 1)
    (tmp_path / "run" / "corpus.json").write_text(json.dumps({"sha256": "of other data"}))
    assert said("eval", tmp_path / "run") == [
        "the run's data have changed since it began: what is held out now was trained on, in part",
        "restore the files as they were, or name another text with --data",
    ]


@pytest.mark.parametrize(("savings", "more"), [((), ""), (("a smaller --context",), "a smaller --context, ")])
def test_memory(savings, more):
    with pytest.raises(UserError) as error, enough_memory("cuda:1", *savings):
        raise MemoryError
    assert str(error.value).split("\n    fix:  ") == [
        "cuda:1 has too little free memory for this model",
        f"use --dtype bfloat16, which takes half, {more}or another --device",
    ]
