"""The pinned lists in requirements/ install on every promised Python and machine, and the check of them can fail."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pins
import pytest
from packaging.specifiers import SpecifierSet
from starting import ROOT

FOLDER = ROOT / "requirements"
TEXTS = {file.stem: file.read_text() for file in FOLDER.glob("*.txt")}
RELEASES = (FOLDER / "wheels.json").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = pins.Project.read(PYPROJECT)


def test_the_lists_install_on_every_promised_python_and_machine():
    assert [*map(str, pins.check(TEXTS, RELEASES, PYPROJECT))] == []


class Changed:
    """The lists and their metadata, to be damaged: a list as its text, metadata as what the JSON says."""

    def __init__(self) -> None:
        self.texts = dict(TEXTS)
        self.releases: dict[str, Any] = json.loads(RELEASES)
        self.pyproject = PYPROJECT

    def replace(self, where: str, old: str, new: str) -> None:
        assert old in self.texts[where]
        self.texts[where] = self.texts[where].replace(old, new)

    def drop(self, where: str, name: str) -> str:
        """A pin's lines, which are taken out of a list."""
        [lines] = re.findall(rf"(?m)^{name}==.*(?:\n    .*)*\n", self.texts[where])
        self.replace(where, lines, "")
        return str(lines)

    def files(self, name: str, keep: Callable[[str], bool]) -> None:
        """Only these files of a release are there, in list and metadata."""
        for build in self.releases[name]["builds"]:
            for file in [file for file in build["files"] if not keep(file)]:
                sha256 = build["files"].pop(file)["sha256"]
                for where, text in self.texts.items():
                    self.texts[where] = text.replace(f" \\\n    --hash=sha256:{sha256}", "")

    def kinds(self) -> set[tuple[str, str]]:
        problems = pins.check(self.texts, json.dumps(self.releases), self.pyproject)
        return {(problem.kind, problem.pin) for problem in problems}


@pytest.fixture
def changed() -> Changed:
    return Changed()


def put_back(changed: Changed) -> None:
    """pymdown-extensions 13.0, which Debian 12's Python 3.11.2 cannot install, as the lists once had it."""
    sha256 = "c68f6e69b14604fb55227735bd0c4c4d3d1d9299a2d1314352190c48aa0d1040"
    changed.drop("all", "pymdown-extensions")
    changed.texts["all"] += f"pymdown-extensions==13.0 \\\n    --hash=sha256:{sha256}\n"


def test_pymdown_extensions_13_0_cannot_come_back(changed):
    put_back(changed)
    assert changed.kinds() == {("has_no_metadata", "pymdown-extensions")}
    release = changed.releases["pymdown-extensions"]
    release["version"] = "13.0"
    [build] = release["builds"]
    build["requires_python"] = ">=3.11.5"
    [sha256] = re.findall(r"pymdown-extensions==13.0 \\\n    --hash=sha256:(\w+)", changed.texts["all"])
    build["files"] = {"pymdown_extensions-13.0-py3-none-any.whl": {"sha256": sha256, "bytes": 1}}
    assert changed.kinds() == {("refuses_python", "pymdown-extensions")}


@pytest.mark.parametrize("python", ["3.11.0", "3.13.7", "3.14.2"])
def test_one_patch_release_that_is_refused_is_seen(changed, python):
    changed.releases["rich"]["builds"][0]["requires_python"] = f">=3.9,!={python}"
    assert changed.kinds() == {("refuses_python", "rich")}


@pytest.mark.parametrize(
    "absent", ["cp311-cp311-manylinux.*x86_64", "cp314-cp314-manylinux.*aarch64", "cp312-cp312-macosx.*arm64"]
)
def test_a_machine_without_a_wheel_is_seen(changed, absent):
    changed.files("grpcio", lambda file: not re.search(absent.replace("arm64", "(arm64|universal2)"), file))
    assert changed.kinds() == {("has_no_wheel", "grpcio")}


def test_a_wheel_for_too_new_a_glibc_or_without_the_gil_is_none(changed):
    for build in changed.releases["torch"]["builds"]:
        names = {file: file.replace("manylinux_2_28", "manylinux_2_34") for file in build["files"]}
        build["files"] = {names[file]: row for file, row in build["files"].items()}
    assert changed.kinds() == {("has_no_wheel", "torch")}
    changed = Changed()
    for build in changed.releases["torch"]["builds"]:
        names = {file: file.replace("cp314-cp314-", "cp314-cp314t-") for file in build["files"]}
        build["files"] = {names[file]: row for file, row in build["files"].items()}
    assert changed.kinds() == {("has_no_wheel", "torch")}


@pytest.mark.parametrize(("where", "name", "by"), [("peer", "networkx", "torch"), ("coordinator", "yarl", "aiohttp")])
def test_a_package_that_another_needs_is_missed(changed, where, name, by):
    changed.drop(where, name)
    del changed.releases[name]
    assert ("lacks", by) in changed.kinds()


def test_a_cuda_package_that_torch_needs_is_missed(changed):
    names = [*pins.read_list(TEXTS["cuda"])[1]]
    changed.drop("cuda", names[0])
    del changed.releases[names[0]]
    assert "lacks" in {kind for kind, _ in changed.kinds()}
    assert pins.read_list(TEXTS["torch"])[1].keys() == {"torch"}


def test_a_version_that_another_package_does_not_allow_is_seen(changed):
    changed.replace("coordinator", "pydantic-core==", "pydantic-core==9")
    changed.releases["pydantic-core"]["version"] = "9" + changed.releases["pydantic-core"]["version"]
    assert changed.kinds() == {("wants_another", "pydantic")}


def test_pyproject_is_what_the_lists_serve(changed):
    changed.pyproject = PYPROJECT.replace('"rich>=13",', '"rich>=99", "tree-of-life",')
    assert changed.kinds() == {("lacks", "pyproject.toml"), ("wants_another", "pyproject.toml")}
    changed.pyproject = PYPROJECT.replace('"rich>=13",', "").replace('"prometheus-client>=0.21",', "")
    assert ("is_needed_by_nothing", "prometheus-client") in changed.kinds()


def test_an_extra_that_a_package_asks_another_for_is_followed(changed):
    changed.releases["aiohttp"]["builds"][0]["requires"].append("rich[picture]")
    changed.releases["rich"]["builds"][0]["requires"].append('pictures>=1; extra == "picture"')
    assert changed.kinds() == {("lacks", "rich")}


def test_a_hash_that_nobody_has_seen_is_refused(changed):
    [line] = re.findall(r"(?m)^rich==.*(?:\n    .*)*\n", TEXTS["coordinator"])
    changed.replace("coordinator", line, re.sub(r"[0-9a-f]{64}", "0" * 64, line))
    assert changed.kinds() == {("has_other_hashes", "rich")}


def test_a_pin_has_one_place(changed):
    changed.texts["test"] += changed.drop("coordinator", "rich")
    assert ("lacks", "pyproject.toml") in changed.kinds()
    changed = Changed()
    changed.texts["test"] += changed.drop("coordinator", "rich")
    changed.texts["coordinator"] = TEXTS["coordinator"]
    assert changed.kinds() == {("is_pinned_twice", "rich")}


def test_only_the_heavy_list_is_built_from_source(changed):
    [build] = changed.releases["pytest"]["builds"]
    [row] = build["files"].values()
    build["files"] = {"pytest-1.tar.gz": row}
    assert changed.kinds() == {("is_built_from_source", "pytest")}


def test_a_list_includes_those_that_it_builds_on(changed):
    changed.replace("user", "-r peer.txt\n", "")
    assert changed.kinds() == {("includes_others", "")}
    del changed.texts["user"]
    assert changed.kinds() == {("is_no_list", "")}


def test_a_coordinator_and_its_list_have_no_torch():
    assert not pins.NOT_FOR_A_COORDINATOR & pins.read_list(TEXTS["coordinator"])[1].keys()
    assert {need.name for need in PROJECT.roots["peer"]} >= pins.NOT_FOR_A_COORDINATOR


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_promised_pythons_are_those_that_are_checked(page):
    [promised] = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / page).read_text())
    minors = [int(python.removeprefix("3.")) for python in PROJECT.pythons]
    assert promised == (PROJECT.pythons[0], PROJECT.pythons[-1])
    assert minors == [*range(minors[0], minors[-1] + 1)]
    [wanted] = re.findall(r'requires-python = "(.*)"', PYPROJECT)
    assert f"3.{minors[0]}.0" in SpecifierSet(wanted)
    assert f"3.{minors[0] - 1}.20" not in SpecifierSet(wanted)


def test_torch_has_no_wheels_for_a_newer_python_than_promised():
    """Then more could be promised."""
    newest = int(PROJECT.pythons[-1].removeprefix("3."))
    newer = pins.Environment(f"3.{newest + 1}", "linux", "x86_64")
    assert pins.read_releases(RELEASES)["torch"].builds_for(newer) == []


def test_setup_installs_a_list_after_those_that_it_builds_on():
    """The modes of scripts/setup.sh are lists, and each installs what its list includes; torch and CUDA come first."""
    script = (ROOT / "scripts" / "setup.sh").read_text()
    [peer] = re.findall(r'^peer="(.*)"$', script, re.MULTILINE)
    modes = dict(re.findall(r"^  (\w+)\) lists=\"?(.*?)\"? ;;$", script, re.MULTILINE))
    assert modes.keys() == pins.INCLUDES.keys() - {"pip", "torch", "cuda"}
    for mode, lists in modes.items():
        names = lists.replace("$peer", peer).split()
        assert names[-1] == mode
        for position, name in enumerate(names):
            assert {*pins.INCLUDES[name]} <= {*names[:position]}
        assert {*names} == closure(mode) | {"pip"}
        assert names[0] == "pip"


def closure(name: str) -> set[str]:
    found = {name} | ({"cuda"} if name == "torch" else set())
    return found.union(*(closure(included) for included in pins.INCLUDES[name]))


@pytest.mark.parametrize("name", pins.INCLUDES)
def test_what_setup_has_installed_is_what_is_pinned(name):
    """… so a test cannot be skipped for want of a package of a list that was installed."""
    installed = Path(sys.prefix) / "installed" / f"{name}.txt"
    if not installed.exists() or installed.read_text() != TEXTS[name]:
        pytest.skip(f"scripts/setup.sh has not installed this requirements/{name}.txt here")
    here = {
        pin.name: pin.version
        for pin in pins.read_list(TEXTS[name])[1].values()
        if name != "cuda" and (pin.marker is None or pin.marker.evaluate())
    }
    assert {pin: importlib.metadata.version(pin).partition("+")[0] for pin in here} == here
