"""`pmtrain eval`: losses against transformers', closed forms, and the reference's own held-out loss."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heavy import heavy
from hypothesis import given
from hypothesis import strategies as st
from random_models import SIZES, TEXT, make_model, make_tokenizer, save
from typer.testing import CliRunner

from protomodels_cli.cli.json_formats import PRINTED
from protomodels_cli.cli.main import app
from protomodels_cli.cli.output import FORMAT
from protomodels_cli.errors import UserError
from protomodels_cli.inference.evaluate import windows

CONTEXT = SIZES["max_position_embeddings"]


def evaluated(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    words = ["eval", *map(str, arguments), "--json", str(tmp_path / "found.json"), "--format", "json"]
    done = CliRunner().invoke(app, words)
    if done.exception is not None:
        raise done.exception
    printed, found = json.loads(done.stdout), json.loads((tmp_path / "found.json").read_text())
    assert printed == {"format": FORMAT, **found}
    PRINTED["eval"].model.model_validate_json(json.dumps(found))
    return dict(found)


def refused(tmp_path: Path, *arguments: Any) -> tuple[str, int]:
    with pytest.raises(UserError) as error:
        evaluated(tmp_path, *arguments)
    return error.value.kind, error.value.exit_code


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"), make_tokenizer())


@given(
    st.lists(st.integers(0, 30), max_size=12),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 12)),
    st.integers(1, 30),
)
def test_every_token_but_the_first_is_predicted_once(sizes, context, most, at_once):
    stream = np.arange(sum(sizes))
    chunks = np.split(stream, np.cumsum(sizes)[:-1]) if sizes else []
    batches = list(windows(iter(chunks), context, most, at_once))
    rows = [row for batch in batches for row in batch]
    assert all(len(batch) * context <= max(at_once, context) for batch in batches)
    targets = np.concatenate([row[1:] for row in rows]) if rows else np.array([])
    everything = stream[1:] if most is None else stream[1:][: most * context]
    assert targets.tolist() == everything.tolist()
    assert all(row[0] == row[1] - 1 for row in rows), "and its window begins with the one before it"
    assert all(len(row) == context + 1 for row in rows[:-1])


def test_the_loss_is_that_of_transformers_on_the_same_windows(model, folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    found = evaluated(tmp_path, folder, "--data", tmp_path / "a.txt")
    tokenizer = make_tokenizer()
    ids = [*tokenizer.encode([TEXT])[0].tolist(), tokenizer.end_id]
    nats = tokens = 0
    for start in range(0, len(ids) - 1, CONTEXT):
        window = torch.tensor([ids[start : start + CONTEXT + 1]])
        with torch.no_grad():
            logits = model(window[:, :-1]).logits
        nats += float(torch.nn.functional.cross_entropy(logits[0].double(), window[0, 1:], reduction="sum"))
        tokens += window.shape[1] - 1
    assert found["tokens"] == tokens == len(ids) - 1
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    scored = len(TEXT.encode()) - len(tokenizer.decode(ids[:1]).encode())
    assert found["bytes"] == scored
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / scored, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_model_that_knows_nothing_all_figures_are_closed_forms(dtype, tmp_path):
    blind = make_model("llama")
    torch.nn.init.zeros_(blind.lm_head.weight)
    save(blind, tmp_path / "model", make_tokenizer())
    (tmp_path / "a.txt").write_text(TEXT)
    found = evaluated(tmp_path, tmp_path / "model", "--data", tmp_path / "a.txt", "--dtype", dtype)
    vocabulary = SIZES["vocab_size"]
    assert found["loss"] == pytest.approx(math.log(vocabulary), rel=1e-6)
    assert found["perplexity"] == pytest.approx(vocabulary, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["tokens"] * math.log2(vocabulary) / found["bytes"], rel=1e-6)


def test_all_kinds_of_files_and_many_of_them(folder, tmp_path):
    """The same documents however they are stored, alone and in a folder."""
    documents = [TEXT[:700], TEXT[700:1300]]
    rows = "".join(json.dumps({"body": text}) + "\n" for text in documents)
    data = tmp_path / "data"
    data.mkdir()
    (data / "rows.jsonl").write_text(rows)
    right = evaluated(tmp_path, folder, "--data", data / "rows.jsonl", "--field", "body")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(text)
    tokenizer = make_tokenizer()
    ids = [i for row in tokenizer.encode(documents) for i in [*row.tolist(), tokenizer.end_id]]
    np.array(ids, dtype="<u2").tofile(tmp_path / "ids.bin")
    for names in (["rows.jsonl.gz"], ["?.txt"], ["0.txt", "1.txt"], ["ids.bin"], ["data"]):
        words = [word for name in names for word in ("--data", tmp_path / name)]
        found = evaluated(tmp_path, folder, *words, "--field", "body")
        same = ("loss", "perplexity", "bits_per_byte", "tokens", "bytes", "windows")
        assert [found[name] for name in same] == pytest.approx([right[name] for name in same]), names
    both = evaluated(tmp_path, folder, "--data", tmp_path / "ids.bin", "--data", tmp_path / "ids.bin")
    assert both["tokens"] == 2 * right["tokens"] + 1


def test_ids_and_text_that_one_name_means_are_all_read(folder, tmp_path):
    tokenizer, data = make_tokenizer(), tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text(TEXT)
    ids = [*tokenizer.encode([TEXT])[0].tolist(), tokenizer.end_id]
    np.array(ids, dtype="<u2").tofile(data / "b.bin")
    (data / "c.dat").write_bytes(b"\0" * 99)
    alone = evaluated(tmp_path, folder, "--data", data / "a.txt")["tokens"]
    assert evaluated(tmp_path, folder, "--data", data / "*")["tokens"] == 2 * alone + 1
    done = CliRunner().invoke(app, ["eval", str(folder), "--data", str(data)])
    assert re.findall(r"\d+ binary", done.stderr) == ["2 binary"], "a folder means its text"
    assert evaluated(tmp_path, folder, "--data", data)["tokens"] == alone
    assert refused(tmp_path, folder, "--data", data / "c.dat") == ("no_file", 3)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "bin", "hf", "files"])
def test_every_source_of_a_spec_can_be_named(folder, tmp_path, source):
    """Whatever the file's name ends with."""
    if source == "hf":
        heavy("datasets")
    data, tokenizer = tmp_path / "data", make_tokenizer()
    file = data / ("train.jsonl" if source == "hf" else "train.odd")
    data.mkdir()
    if source in ("text", "files"):
        file.write_text(TEXT)
    elif source == "parquet":
        heavy("pyarrow.parquet").write_table(heavy("pyarrow").table({"text": [TEXT]}), file)
    elif source == "bin":
        np.array([*tokenizer.encode([TEXT])[0].tolist(), tokenizer.end_id], dtype="<u2").tofile(file)
    else:
        file.write_text(json.dumps({"text": TEXT}) + "\n")
    (tmp_path / "a.txt").write_text(TEXT)
    right = evaluated(tmp_path, folder, "--data", tmp_path / "a.txt")["loss"]
    name = f"hf:{data},split=train" if source == "hf" else f"{source}:{file}"
    assert evaluated(tmp_path, folder, "--data", name)["loss"] == pytest.approx(right)


@pytest.mark.parametrize("name", ["hf:", "hf:a,splits=b", "hf:a,split", "hf:a,split="])
def test_what_names_no_dataset_is_refused(folder, tmp_path, name):
    assert refused(tmp_path, folder, "--data", name) == ("dataset", 2)


def test_windows_and_context(folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    words = [folder, "--data", tmp_path / "a.txt"]
    found = evaluated(tmp_path, *words, "--windows", 3, "--context", 20)
    assert (found["windows"], found["tokens"], found["context"]) == (3, 60, 20)
    ids = make_tokenizer().encode([TEXT])[0].tolist()
    assert found["bytes"] == len(make_tokenizer().decode(ids[1:61]).encode())
    assert refused(tmp_path, *words, "--context", CONTEXT + 1) == ("context", 2)


def test_what_cannot_be_evaluated(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    np.array([1, 2, 65535], dtype="<u2").tofile(tmp_path / "ids.bin")
    assert refused(tmp_path, folder) == ("no_data", 2)
    assert refused(tmp_path, folder, "--data", tmp_path / "none.txt") == ("no_file", 3)
    assert refused(tmp_path, folder, "--data", tmp_path / "empty.txt") == ("too_short", 3)
    assert refused(tmp_path, folder, "--data", tmp_path / "ids.bin") == ("vocabulary", 3)
    assert refused(tmp_path, tmp_path, "--data", "builtin") == ("no_model", 3)


def test_a_model_of_ids_is_evaluated_on_ids(model, tmp_path):
    save(model, tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT)
    np.arange(300, dtype="<u2").tofile(tmp_path / "ids.bin")
    found = evaluated(tmp_path, tmp_path / "model", "--data", tmp_path / "ids.bin")
    assert (found["tokens"], found["bytes"], found["bits_per_byte"]) == (299, None, None)
    assert refused(tmp_path, tmp_path / "model", "--data", tmp_path / "a.txt") == ("no_tokenizer", 3)
