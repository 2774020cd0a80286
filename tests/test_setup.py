"""scripts/setup.sh as a real process: small lists and wheels made here, which pip finds in a folder; no network."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pins
import pytest
from starting import ROOT
from waiting import wait_for

# Builds pmtrain without setuptools: not every Python's .venv has one.
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/pmtrain-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pmtrain.pth", "")
        wheel.writestr("pmtrain-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: pmtrain\\nVersion: 1\\n")
        wheel.writestr("pmtrain-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("pmtrain-1.dist-info/RECORD", "pmtrain.pth,,\\n")
    return "pmtrain-1-py3-none-any.whl"
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "pmtrain"
version = "1"
requires-python = ">=3.11,!=3.12.99"
classifiers = [
  "Programming Language :: Python :: 3.11",
  "Programming Language :: Python :: 3.{}",
]
"""
HERE = sys.version_info.minor


class Checkout:
    """A folder with the real script, and lists of one package each, with the list's name."""

    def __init__(self, folder: Path):
        self.folder, self.wheels = folder, folder / "wheels"
        self.site = folder / f".venv/lib/python3.{HERE}/site-packages"
        for name in ("scripts", "requirements", "wheels", "protomodels_cli", "home"):
            (folder / name).mkdir(parents=True)
        for name in ("setup.sh", "index_reachable.py"):
            shutil.copy(ROOT / "scripts" / name, folder / "scripts")
        (folder / "backend.py").write_text(BACKEND)
        (folder / "pyproject.toml").write_text(PYPROJECT.format(max(HERE, 12)))
        for name in pins.INCLUDES:
            self.write_list(name)

    def write_list(
        self, name: str, version: str = "1.0", requires: str = "", files: Mapping[str, str] | None = None
    ) -> None:
        """METADATA comes first in the wheel. An install that is killed has left it behind. ZipInfo has no clock."""
        package = name if name == "torch" else f"list-{name}"
        title = package.replace("-", "_")
        info = f"{title}-{version}.dist-info"
        wheel = self.wheels / f"{title}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            head = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{requires}"
            archive.writestr(zipfile.ZipInfo(f"{info}/METADATA"), head)
            kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(zipfile.ZipInfo(f"{info}/WHEEL"), kind)
            for file, text in (files or {f"{title}.py": f"version = {version!r}"}).items():
                archive.writestr(zipfile.ZipInfo(file), text)
            record = "".join(f"{file},,\n" for file in archive.namelist())
            archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record)
        lines = [f"# {name}", "#", "# 1 package, 1 MB", *(f"-r {n}.txt" for n in pins.INCLUDES[name])]
        lines += [f"{package}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"]
        (self.folder / "requirements" / f"{name}.txt").write_text("\n".join(lines) + "\n")

    def begin(self, *words: str, **more: str) -> subprocess.Popen[str]:
        env = {"HOME": str(self.folder / "home"), "PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull}
        env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PYTHON": sys.executable, **more}
        return subprocess.Popen(
            ["bash", "scripts/setup.sh", *words],
            cwd=self.folder,
            env={name: value for name, value in env.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, **more: str) -> tuple[int, str]:
        with self.begin(*words, **more) as process:
            said = process.communicate(timeout=240)[0]
        return process.returncode, said

    def has(self) -> dict[str, str]:
        """Versions of the packages of lists that are there, and of pmtrain."""
        found = [path.name.removesuffix(".dist-info").partition("-") for path in self.site.glob("*.dist-info")]
        return {name.removeprefix("list_"): version for name, _, version in found if name not in ("pip", "setuptools")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """One whose .venv the script has made, with a user's packages."""
    checkout = Checkout(tmp_path_factory.mktemp("setup") / "checkout")
    code, said = checkout.run()
    assert code == 0, said
    assert checkout.has() == dict.fromkeys(("pip", "torch", "coordinator", "peer", "user"), "1.0") | {"pmtrain": "1"}
    numbers = re.findall(r"^\[(\d)/(\d)\]", said, re.MULTILINE)
    assert numbers == [(str(n), "7") for n in range(1, 8)], said
    return checkout


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    """A copy of it, which a test may change."""
    copy = Checkout(tmp_path / "checkout")
    shutil.copytree(made.folder / ".venv", copy.folder / ".venv", symlinks=True)
    return copy


@pytest.mark.full
def test_what_is_there_is_not_installed_again(checkout):
    for words in ((), ("user",), ("peer",), ("coordinator",)):
        assert checkout.run(*words) == (0, "")


@pytest.mark.full
def test_a_larger_list_only_adds_and_a_list_that_changed_is_installed_again(checkout):
    code, said = checkout.run("all")
    assert (code, checkout.has().keys()) == (0, {*pins.INCLUDES, "pmtrain"} - {"cuda"}), said
    assert re.findall(r"^\[\d/3\]", said, re.MULTILINE) == [f"[{n}/3]" for n in range(1, 4)]
    assert checkout.run("test") == (0, "")
    checkout.write_list("coordinator", "1.1")
    code, said = checkout.run("test")
    assert (code, checkout.has()["coordinator"]) == (0, "1.1"), said
    assert checkout.run() == (0, "")


@pytest.mark.full
def test_a_torch_that_needs_cuda_gets_it(checkout):
    """… by its own metadata, also where the list of CUDA packages did not change."""
    assert "cuda" not in checkout.has()
    checkout.write_list("torch", "2.0", f'Requires-Dist: list-cuda==1.0; sys_platform == "{sys.platform}"\n')
    code, said = checkout.run()
    assert (code, checkout.has()["torch"], checkout.has()["cuda"]) == (0, "2.0", "1.0"), said


@pytest.mark.full
def test_a_cpu_build_of_torch_is_preferred_if_pip_knows_one_with_a_listed_hash(checkout):
    """Other than in a folder, an index tells the hash of what it has, and pip would prefer that."""
    list_of_torch = checkout.folder / "requirements" / "torch.txt"
    checkout.write_list("torch", "2.0+cpu")
    [of_cpu] = re.findall(" --hash.*", list_of_torch.read_text())
    checkout.write_list("torch", "2.0", f'Requires-Dist: list-cuda==1.0; sys_platform == "{sys.platform}"\n')
    index = checkout.folder / "index" / "torch"
    index.mkdir(parents=True)
    [cuda] = checkout.wheels.glob("torch-2.0-*")
    cuda.rename(index / cuda.name)
    sha256 = hashlib.sha256((index / cuda.name).read_bytes()).hexdigest()
    (index / "index.html").write_text(f'<!DOCTYPE html><a href="{cuda.name}#sha256={sha256}">{cuda.name}</a>')
    from_index = {"PIP_NO_INDEX": "", "PIP_INDEX_URL": index.parent.as_uri()}
    code, said = checkout.run(**from_index)
    assert (code, checkout.has()["torch"], "cuda" in checkout.has()) == (0, "2.0", True), said
    list_of_torch.write_text(list_of_torch.read_text().strip() + of_cpu + "\n")
    code, said = checkout.run(**from_index)
    assert (code, checkout.has()["torch"]) == (0, "2.0+cpu"), said


def test_a_wheel_with_another_hash_is_not_installed(checkout):
    checkout.write_list("user", "1.1")
    list_of_user = checkout.folder / "requirements" / "user.txt"
    list_of_user.write_text(re.sub(r"[0-9a-f]{64}", "0" * 64, list_of_user.read_text()))
    code, said = checkout.run()
    assert (code, checkout.has()["user"]) == (3, "1.0"), said
    assert "    fix:  " in said


@pytest.mark.full
def test_an_install_that_is_killed_is_mended(checkout):
    """Killed while pip unpacks a package whose metadata is there already: pip alone would take it for installed."""
    files = {f"many/file_{n}.py": "" for n in range(6000)}
    checkout.write_list("user", "1.1", files=files)
    process = checkout.begin()
    wait_for(lambda: (checkout.site / "list_user-1.1.dist-info" / "METADATA").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (checkout.site / "many" / "file_5999.py").exists(), "pip had finished before it could be killed"
    code, said = checkout.run()
    assert (code, checkout.has()["user"]) == (0, "1.1"), said
    assert {f"many/{path.name}" for path in (checkout.site / "many").glob("*.py")} == files.keys()


@pytest.mark.full
def test_a_venv_that_is_half_made_is_mended(checkout):
    """Killed while pip came into it, and before anything else did."""
    [info] = checkout.site.glob("pip-*.dist-info")
    (info / "RECORD").write_text("")
    shutil.rmtree(checkout.site / "pip" / "_vendor")
    shutil.rmtree(checkout.folder / ".venv" / "installed")
    code, said = checkout.run(PYTHON="")
    assert code == 0, said
    assert checkout.run() == (0, "")


@pytest.mark.full
def test_a_venv_whose_python_is_gone_is_made_afresh(checkout):
    for link in (checkout.folder / ".venv" / "bin").glob("python*"):
        link.unlink()
        link.symlink_to("/nowhere/python3")
    (checkout.folder / "pyproject.toml").write_text(PYPROJECT.format(max(HERE, 12)) + "\n")
    code, said = checkout.run("coordinator")
    assert (code, checkout.has().keys()) == (0, {"pip", "coordinator", "pmtrain"}), said


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_network_that_is_away_is_said_at_once(checkout, kind):
    checkout.write_list("user", "1.1")
    with socket.create_server(("127.0.0.1", 0)) as index:
        port = index.getsockname()[1]
        if kind == "closed":
            index.close()
        more = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_DEFAULT_TIMEOUT": "1"}
        code, said = checkout.run(PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple", **more)
    assert (code, checkout.has()["user"]) == (3, "1.0")
    assert "127.0.0.1" in said
    assert "    fix:  " in said
    assert "[1/" not in said, "pip was not even tried"
    code, said = checkout.run()
    assert (code, checkout.has()["user"]) == (0, "1.1"), said


def python_that_says(folder: Path, version: str) -> str:
    stub = folder / "python"
    stub.write_text(f"#!/bin/sh\necho {version}\n")
    stub.chmod(0o755)
    return str(stub)


@pytest.mark.parametrize("version", ["3.10.12", "3.99.0", "2.7.18", "3.12.99"])
def test_a_python_that_is_not_promised_is_refused(tmp_path, version):
    checkout = Checkout(tmp_path / "checkout")
    code, said = checkout.run(PYTHON=python_that_says(tmp_path, version))
    assert code == 3
    assert version in said
    assert f"3.11 to 3.{max(HERE, 12)}" in said
    assert "    fix:  " in said
    assert not (checkout.folder / ".venv").exists()


def test_another_python_than_that_of_the_venv_is_refused(checkout, tmp_path):
    other = max(HERE, 12) if HERE == 11 else 11
    checkout.write_list("user", "1.1")
    code, said = checkout.run(PYTHON=python_that_says(tmp_path, f"3.{other}.7"))
    assert (code, checkout.has()["user"]) == (3, "1.0")
    assert f"3.{other}" in said
    assert f"3.{HERE}" in said
    code, said = checkout.run(PYTHON="")
    assert code == 0, said


def test_a_python_without_ensurepip_is_told_which_package_has_it(tmp_path):
    """As Debian's without python3-venv."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "ensurepip.py").write_text("raise ImportError")
    checkout = Checkout(tmp_path / "checkout")
    code, said = checkout.run(PYTHONPATH=str(tmp_path / "path"))
    assert code == 3
    assert f"python3.{HERE}-venv" in said
    assert not (checkout.folder / ".venv").exists()


def test_a_python_that_is_not_there_and_a_list_that_is_none_are_refused(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    assert checkout.run(PYTHON="/nowhere/python3")[0] == 3
    assert checkout.run("everything")[0] == 2
