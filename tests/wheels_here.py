"""Wheels of what is installed here, for an installation from nothing that needs no network."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from starting import ROOT

PACKAGE = "protomodels_cli"


def our_wheel(into: Path, source: Path) -> Path:
    """Built from a copy: a build leaves files behind, and takes over what an earlier one left."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(into.absolute()), "."]
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    [made] = into.glob("pmtrain-*.whl")
    return made


def wheels_of_dependencies(into: Path, links: Path) -> None:
    """Of all that pmtrain requires. torch, which is gigabytes, is a wheel that leads to the one installed here: `links`
    has links to its packages and to nothing else."""
    for name in sorted(_required()):
        one = metadata.distribution(name)
        _wheel(one, into, links if name == "torch" else None)


def _required() -> set[str]:
    found: set[str] = set()
    todo = [Requirement(line) for line in _own_requirements()]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        if name in found or not (asked.marker is None or asked.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        todo += map(Requirement, metadata.requires(name) or ())
    return found


def _own_requirements() -> list[str]:
    import tomllib

    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def _wheel(one: metadata.Distribution, into: Path, links: Path | None) -> None:
    title, site = one.name.replace("-", "_"), Path(str(one.locate_file("")))
    files = [str(file) for file in one.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
    info = next(file.split("/")[0] for file in files if file.split("/")[0].endswith(".dist-info"))
    with zipfile.ZipFile(into / f"{title}-{one.version}-py3-none-any.whl", "w") as wheel:
        for file in files:
            inside = file.startswith(f"{info}/")
            if file == f"{info}/RECORD" or (links is not None and not inside):
                continue
            wheel.write(site / file, file)
        wheel.writestr(f"{info}/RECORD", "")
        if links is not None:
            wheel.writestr(f"{title}.pth", f"{links}\n")
            for top in {file.split("/")[0] for file in files if not file.startswith(info)}:
                os.symlink(site / top, links / top)
