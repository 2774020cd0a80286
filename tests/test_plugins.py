"""A package elsewhere that is wrong, in what it says it adds, is named with its entry point."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import make_spec
from starting import pmtrain

TOY = Path(__file__).parent / "toy_package"
ENTRY_POINTS = "entry_points.txt"

WRONG = [
    ("codecs", "int8 = pmtrain_toy.toy_codec:Delta", "pmtrain's own"),
    ("codecs", "toydelta = pmtrain_toy.nowhere:Delta", "ModuleNotFoundError"),
    ("codecs", "toydelta = pmtrain_toy.toy_codec:MOST", "32767"),
    ("codecs", "toydelta = protomodels_cli.codecs.base:BaseCodec", "<class 'protomodels_cli.codecs.base.BaseCodec'>"),
    ("codecs", "toydelta = protomodels_cli.codecs.fp32:FP32", "<class 'protomodels_cli.codecs.fp32.FP32'>"),
    ("forms", "dense = pmtrain_toy.toy_form:Split", "pmtrain's own"),
    ("forms", "toysplit = pmtrain_toy.nowhere:Split", "ModuleNotFoundError"),
    ("forms", "toysplit = pmtrain_toy.toy_form:lazy_import", "<function lazy_import"),
    ("forms", "toysplit = protomodels_cli.forms.base:Form", "<class 'protomodels_cli.forms.base.Form'>"),
    ("forms", "toysplit = protomodels_cli.forms.dense:Dense", "<class 'protomodels_cli.forms.dense.Dense'>"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a spec that uses a form and a codec of the toy package."""
    toys = {"wire": {"forward": "toydelta:0.001"}, "subspace": {"form": "toysplit"}, "optimizer": {"name": "adamw"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**make_spec(stages=2).model_dump(mode="json"), **toys}))
    return tmp_path


@pytest.mark.parametrize(("group", "line", "said"), WRONG)
def test_a_package_that_is_wrong_is_named_with_its_entry_point(folder, monkeypatch, group, line, said):
    wrong = shutil.copytree(TOY, folder / "wrong") / "pmtrain_toy-0.1.dist-info" / ENTRY_POINTS
    others = {"codecs": "toydelta = pmtrain_toy.toy_codec:Delta", "forms": "toysplit = pmtrain_toy.toy_form:Split"}
    wrong.write_text("".join(f"[pmtrain.{g}]\n{point}\n" for g, point in (others | {group: line}).items()))
    monkeypatch.setenv("PYTHONPATH", str(folder / "wrong"))
    done = pmtrain("validate", "run.yaml", cwd=folder)
    assert done.returncode == 3
    for part in (said, "pmtrain-toy 0.1", line.partition(" = ")[2]):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("group", ["codecs", "forms"])
def test_two_packages_may_not_claim_one_name(folder, monkeypatch, group):
    other = folder / "other" / "another_toy-2.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: another-toy\nVersion: 2\n")
    groups = (TOY / "pmtrain_toy-0.1.dist-info" / ENTRY_POINTS).read_text().split("[")
    [claimed] = [text for text in groups if text.startswith(f"pmtrain.{group}]")]
    (other / ENTRY_POINTS).write_text(f"[{claimed}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), str(other.parent)]))
    done = pmtrain("validate", "run.yaml", cwd=folder)
    assert done.returncode == 3
    assert "pmtrain-toy 0.1" in done.stderr
    assert "another-toy 2" in done.stderr
