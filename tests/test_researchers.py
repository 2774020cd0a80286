"""The package that docs/for-researchers.md writes out, taken from the page and used."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import make_spec
from starting import ROOT, pmtrain

PAGE = (ROOT / "docs" / "for-researchers.md").read_text()
SPEC = make_spec(stages=2, optimizer={"name": "adamw"}).model_dump(mode="json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the page's package, as pip would install it, where every process that is started can see it."""
    for name, text in re.findall(r"```python\n# (\w+/\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    [text] = re.findall(r"```toml\n# pyproject.toml\n(.*?)```", PAGE, re.DOTALL)
    project = tomllib.loads(text)["project"]
    info = tmp_path / f"pmtrain_example-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def trained(folder: Path, **sections: object) -> str:
    """The hash of the weights."""
    (folder / "run.yaml").write_text(yaml.safe_dump({**SPEC, **sections}))
    done = pmtrain("reference", "run.yaml", "--steps", 3, "--run-dir", f"run-{len([*folder.iterdir()])}", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_the_example_trains_and_its_form_changes_no_bit(folder):
    [used] = re.findall(r"```yaml\n(subspace.*?)```", PAGE, re.DOTALL)
    used = yaml.safe_load(used)
    dense = trained(folder, subspace={"form": "dense"})
    assert trained(folder, subspace=used["subspace"]) == dense
    assert trained(folder, **used) != dense, "half of the bits should be missed"
