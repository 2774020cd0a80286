"""A form that a package elsewhere adds through an entry point is used like our own; one that is wrong is named.

That a pipeline with it resumes and equals the reference is in test_toy.py, together with the toy codec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from conftest import make_spec
from starting import pmtrain

from protomodels_cli.forms import FORMS

TOY = Path(__file__).parent / "toy_package"
SPEC = make_spec(stages=2, optimizer={"name": "adamw"}).model_dump(mode="json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a spec of the toy form, and its package where every process that is started can see it."""
    monkeypatch.setenv("PYTHONPATH", str(TOY))
    return with_form(tmp_path)


def with_form(folder: Path, form: str = "toysplit", **sections: object) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump({**SPEC, "subspace": {"form": form}, **sections}))
    return folder


def problems(folder: Path) -> list[dict]:
    done = pmtrain("validate", "run.yaml", "--format", "json", cwd=folder)
    assert done.returncode == 2
    [found] = json.loads(done.stdout)["files"]
    return found["problems"]


def test_the_toy_form_is_validated_and_planned(folder):
    done = pmtrain("validate", "run.yaml", "--format", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)["files"]
    dense = pmtrain("validate", "run.yaml", "--format", "json", cwd=with_form(folder, "dense"))
    [ordinary] = json.loads(dense.stdout)["files"]
    written = 256 * 32 + 4 * (32 + 64) * 32  # the embedding and, of four layers, W_o and W_down: twice as wide
    assert sum(found["parameters_per_stage"]) == sum(ordinary["parameters_per_stage"]) + written
    done = pmtrain("plan", "run.yaml", "--speed", "10gflops", "--format", "json", cwd=with_form(folder))
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)["forecast"]["bytes_per_step"]["backward"]
    assert sent >= 4 * 16 * 32 * 4  # windows, tokens, the stream's width, bytes of a number


def test_the_toy_form_says_which_optimizer_fits(folder):
    [problem] = problems(with_form(folder, optimizer={"name": "muon"}))
    assert (problem["field"], problem["kind"]) == ("optimizer.name", "optimizer_fits_form")


def test_without_its_package_the_form_is_none(tmp_path):
    [problem] = problems(with_form(tmp_path))
    assert (problem["field"], problem["kind"], problem["value"]) == ("subspace.form", "word", "toysplit")
    assert all(form in problem["rule"] for form in FORMS.builtin)
    assert "toysplit" not in problem["rule"]


def test_what_there_is_includes_what_was_added(folder):
    [problem] = problems(with_form(folder, "toysplitt"))
    assert all(form in problem["rule"] for form in (*FORMS.builtin, "toysplit"))
    assert "'toysplit'" in problem["fix"]
