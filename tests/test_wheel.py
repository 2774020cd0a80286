"""What is installed is what was written: one version everywhere, and a wheel that needs no checkout beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from starting import ROOT
from typer.testing import CliRunner

from protomodels_cli import __version__
from protomodels_cli.cli.main import app

PACKAGE = "protomodels_cli"
# The demo's spec and its text, read as the demo reads them; what it prints says from where.
LOADS = """
from pathlib import Path
import protomodels_cli
from protomodels_cli.cli import run_demo
from protomodels_cli.data.prepare import prepare

spec = run_demo._spec(None, 4)
spec = spec.model_copy(update={"data": spec.data.model_copy(update={"max_bytes": 200_000})})
print(protomodels_cli.__file__, spec.steps, len(prepare(spec, Path.cwd()).train))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: a build leaves files behind, and takes over what an earlier one left."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
    ]
    done = subprocess.run([*build, "."], cwd=source, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    [made] = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(made)


def test_the_version_stands_in_one_place(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": f"{PACKAGE}.__version__"}
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    assert Parser().parsestr(wheel.read(metadata).decode())["Version"] == __version__
    assert CliRunner().invoke(app, ["--version"]).stdout.split() == ["pmtrain", __version__]


def test_the_changelog_has_this_version_or_says_that_it_is_not_released():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1:] in ([], [__version__, *headings[2:]])


def test_the_wheel_has_all_files_of_the_package_and_no_others(wheel):
    """A file that is no Python needs a pattern in pyproject.toml, under tool.setuptools.package-data."""
    here = {
        str(f.relative_to(ROOT)) for f in (ROOT / PACKAGE).rglob("*") if f.is_file() and "__pycache__" not in f.parts
    }
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert there == here


def test_the_demo_needs_nothing_but_the_wheel(wheel, tmp_path):
    """In an empty folder, with an empty home: its spec and its text are found in the wheel."""
    wheel.extractall(tmp_path / "installed")
    for name in ("elsewhere", "home"):
        (tmp_path / name).mkdir()
    environment = {"PATH": os.defpath, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", LOADS]
    done = subprocess.run(
        command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    where, steps, tokens = done.stdout.split()[-3:]
    assert Path(where).is_relative_to(tmp_path / "installed")
    assert int(steps) > 0
    assert int(tokens) > 10_000
