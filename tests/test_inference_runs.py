"""Generating from run directories and evaluating them: the same model as its export, the same loss as in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import save_reference, save_run
from typer.testing import CliRunner

from protomodels_cli.cli.main import app
from protomodels_cli.errors import UserError
from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import export

MOVES = {"update": {"interval": 2, "window": 1, "delay": 1}}


def evaluated(run: Path, *arguments: Any) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["eval", str(run), *map(str, arguments), "--json", f"{run}.json"])
    if done.exception is not None:
        raise done.exception
    return dict(json.loads(Path(f"{run}.json").read_text()))


def generated(model: Path, *arguments: Any) -> str:
    done = CliRunner().invoke(app, ["generate", str(model), *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.mark.parametrize("save", [save_reference, save_run])
@pytest.mark.parametrize("form", ["dense", "reparam", "constrained"])
def test_the_loss_is_the_references_on_its_own_held_out_windows(form, save, tmp_path):
    """Without what lossy codecs cost: those are the wire's."""
    subspace = {"form": form} | ({} if form == "dense" else MOVES)
    lossy = {"forward": "int4", "backward": "int8"}
    r = save(
        tmp_path / "run", 5, subspace=subspace, wire=lossy, model={"qk_norm": form == "reparam"}, optimizer={"lr": 0.02}
    )
    right = r.evaluate(codecs=False)
    assert abs(right - r.evaluate()) > 1e-4
    found = evaluated(tmp_path / "run")
    assert found["loss"] == pytest.approx(right, abs=1e-5)
    assert (found["windows"], found["tokens"]) == (r.spec.eval.windows, r.spec.eval.windows * r.spec.model.context)
    assert (found["step"], found["data"]) == (5, None)


@pytest.mark.full
def test_fewer_and_shorter_windows_of_the_held_out_text(tmp_path):
    r = save_reference(tmp_path / "run", 1)
    found = evaluated(tmp_path / "run", "--windows", 3, "--context", 8)
    assert (found["windows"], found["tokens"], found["context"]) == (3, 24, 8)
    every = evaluated(tmp_path / "run", "--windows", 10**6)
    assert every["windows"] == (len(r.corpus.held_out) - 1) // r.spec.model.context


@pytest.mark.parametrize("tokenizer", [{"kind": "bytes"}, {"kind": "bpe", "vocab_size": 300}])
def test_a_run_directory_and_its_export_write_the_same_text(tokenizer, tmp_path):
    save_run(tmp_path / "run", 2, tokenizer=tokenizer)
    with open_source(tmp_path / "run") as source:
        export(source, tmp_path / "out")
    texts = [
        generated(tmp_path / name, "--prompt", prompt, "--seed", 1, "--tokens", 12)
        for name in ("run", "out")
        for prompt in ("The é", "")
    ]
    assert texts[:2] == texts[2:]
    assert texts[0].startswith("The é")
    assert len(texts[0]) > len("The é\n")
    (tmp_path / "a.txt").write_text("Of the people, by the people, for the people.\n" * 9)
    figures = [evaluated(tmp_path / name, "--data", tmp_path / "a.txt") for name in ("run", "out")]
    for name in ("loss", "bits_per_byte", "tokens", "bytes"):
        assert figures[0][name] == pytest.approx(figures[1][name], rel=1e-6), name


def test_bytes_have_as_many_bits_as_the_loss_says(tmp_path):
    """Where every token is a byte, and none a mark, both figures are one."""
    save_reference(tmp_path / "run", 1)
    (tmp_path / "a.txt").write_text("abc " * 40)
    found = evaluated(tmp_path / "run", "--data", tmp_path / "a.txt")
    assert (found["tokens"], found["bytes"]) == (160, 159)  # the mark at the end is predicted, and no byte
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / np.log(2) * 160 / 159)


def test_data_that_have_changed_are_not_called_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} of many\n" for i in range(900)))
    data = {"source": "text", "files": [str(tmp_path / "a.txt")], "max_bytes": None}
    save_reference(tmp_path / "run", 1, data=data)
    evaluated(tmp_path / "run")
    (tmp_path / "a.txt").write_text("".join(f"line {i} of others\n" for i in range(900)))
    with pytest.raises(UserError) as changed:
        evaluated(tmp_path / "run")
    assert (changed.value.kind, changed.value.exit_code) == ("data_changed", 3)


def test_a_run_that_has_not_kept_its_datas_hash_is_evaluated_all_the_same(tmp_path):
    save_reference(tmp_path / "run", 1)
    right = evaluated(tmp_path / "run")["loss"]
    (tmp_path / "run" / "corpus.json").write_text("{}")
    assert evaluated(tmp_path / "run")["loss"] == right


def test_a_run_of_ids_is_evaluated_and_writes_nothing(tmp_path):
    np.random.default_rng(0).integers(0, 90, 3000).astype("<u2").tofile(tmp_path / "ids.bin")
    data = {"source": "bin", "files": [str(tmp_path / "ids.bin")], "max_bytes": None, "val_fraction": 0.2}
    r = save_reference(tmp_path / "run", 1, data=data, tokenizer={"kind": "none", "vocab_size": 90})
    found = evaluated(tmp_path / "run")
    assert found["loss"] == pytest.approx(r.evaluate(codecs=False), abs=1e-5)
    assert found["bits_per_byte"] is None
    with pytest.raises(UserError) as refused:
        generated(tmp_path / "run", "--prompt", "x")
    assert (refused.value.kind, refused.value.exit_code) == ("no_tokenizer", 3)
