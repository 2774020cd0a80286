"""Completion in a real bash: the script that pmtrain shows for it, and what it offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from starting import ROOT

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a `pmtrain` on the PATH, runs, and specs."""
    folder = tmp_path_factory.mktemp("completion")
    program = folder / "bin" / "pmtrain"
    program.parent.mkdir()
    start = f"{sys.executable} -c 'from protomodels_cli.cli.main import main; main()'"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {start} "$@"\n')
    program.chmod(0o755)
    for name in ("tiny", "tinier", "other"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "private.json").touch()
    (folder / "configs").mkdir()
    (folder / "configs" / "small.yaml").touch()
    return folder


def offered(folder: Path, line: str) -> set[str]:
    """What bash offers at the end of this line."""
    if BASH is None:
        pytest.skip("no bash here")
    script = """
eval "$(pmtrain --show-completion)"
COMP_WORDS=($LINE)
[ "${LINE% }" = "$LINE" ] || COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_pmtrain_completion pmtrain
printf '%s\\n' "${COMPREPLY[@]}"
"""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "LINE": f"pmtrain {line}", "HOME": str(folder)}
    done = subprocess.run(
        [BASH, "--norc", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ev", {"eval", "events"}),
        ("status ti", {"tiny", "tinier"}),
        ("events --fo", {"--follow", "--format"}),
        ("validate ", {"bin/", "configs/", "configs/small.yaml", "runs/"}),
    ],
)
def test_bash_offers(folder: Path, line: str, words: set[str]):
    assert offered(folder, line) == words
