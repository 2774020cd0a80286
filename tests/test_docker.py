"""The Dockerfile, as far as that goes without an engine: what it says, and the steps of the coordinator's image."""

from __future__ import annotations

import fnmatch
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import dockerfile
import pytest
from starting import ROOT

STAGES = dockerfile.read(ROOT / "Dockerfile")
TARGETS = "coordinator", "peer-cuda", "peer-cpu"


def ignored(name: str) -> bool:
    """By .dockerignore: the last pattern that fits decides."""
    left_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line.startswith("#") and (name == pattern or fnmatch.fnmatch(name, pattern)):
            left_out = not line.startswith("!")
    return left_out


@pytest.mark.parametrize("name", TARGETS)
def test_no_image_runs_as_root_and_each_says_whether_it_is_healthy(name):
    line = dockerfile.lineage(STAGES, name)
    [user] = [user for stage in line for user in stage.of("USER")]
    assert int(user) > 0
    assert f"--uid {user} " in " ".join(run for stage in line for run in stage.of("RUN"))
    [health] = [health for stage in line for health in stage.of("HEALTHCHECK")]
    python, option, program = dockerfile.command(health)
    assert (python, option) == ("python3", "-c")
    compile(program, "Dockerfile", "exec")
    [entry] = [dockerfile.command(entry) for stage in line for entry in stage.of("ENTRYPOINT")]
    assert entry == ["pmtrain"]


def test_what_is_copied_is_there_and_nothing_else_goes_to_the_engine():
    """A link would be copied as one, and point nowhere in the image."""
    context = {name for s in STAGES.values() for c in s.of("COPY") for name in copied_from_here(c)}
    for name in context:
        assert (ROOT / name).exists()
        assert not ignored(name), name
        assert not [*filter(Path.is_symlink, [ROOT / name, *(ROOT / name).rglob("*")])]
    assert {p.name for p in ROOT.iterdir() if not ignored(p.name)} == context


def copied_from_here(rest: str) -> list[str]:
    source, names, _ = dockerfile.copied(rest)
    return names if source is None else []


def healthy(name: str, **replaced: object) -> int:
    """What the image's health check ends with, with other numbers in it."""
    [health] = STAGES[name].of("HEALTHCHECK")
    program = dockerfile.command(health)[-1]
    for old, new in replaced.items():
        assert old.strip("_") in program
        program = program.replace(old.strip("_"), str(new))
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL, timeout=60).returncode


def test_a_coordinator_is_healthy_while_its_door_takes_connections():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        assert healthy("coordinator", _7420=port) == 0
    assert healthy("coordinator", _7420=port) != 0


def test_the_health_check_knows_the_coordinators_own_port():
    from protomodels_cli.cli.coordinator import DEFAULT_PORT

    assert STAGES["coordinator"].of("EXPOSE") == [str(DEFAULT_PORT)]
    assert str(DEFAULT_PORT) in STAGES["coordinator"].of("HEALTHCHECK")[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stages that make the coordinator's packages, each in a folder that stands for its root, and their RUN lines
    as they are. Nothing is fetched: what pip would install is put where it finds it, and setuptools with it."""
    root = tmp_path_factory.mktemp("images")
    site = sysconfig.get_path("purelib")
    for name in ("wheel", "coordinator-packages"):
        here, folder = root / name, root / name
        environment = {**os.environ, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        for stage in reversed(dockerfile.lineage(STAGES, name)):
            for word, rest in stage.instructions:
                if word == "WORKDIR":
                    folder = here / rest.lstrip("/")
                    folder.mkdir(parents=True, exist_ok=True)
                elif word == "ENV":
                    values = (value.partition("=") for value in rest.split())
                    environment |= {k: f"{here}{v}" if v.startswith("/") else v for k, _, v in values}
                elif word == "COPY":
                    source, names, target = dockerfile.copied(rest)
                    for one in names:
                        origin = root / source / one.lstrip("/") if source else ROOT / one
                        copy(origin, folder / target)
                elif word == "RUN":
                    done = subprocess.run(rest, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
                    assert done.returncode == 0, f"{name}: {rest}\n{done.stderr}"
                    if "-m venv" in rest:
                        [inside] = Path(environment["VIRTUAL_ENV"]).glob("lib/python*/site-packages")
                        (inside / "here.pth").write_text(site)
    return root


def copy(origin: Path, target: Path) -> None:
    if origin.is_dir():
        shutil.copytree(origin, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(origin, target)


@pytest.mark.full
def test_the_steps_of_the_coordinators_image_run(built):
    """… and what they made says its version, from the packages of the image."""
    from protomodels_cli import __version__

    prefix = built / "coordinator-packages" / "opt" / "pmtrain"
    done = subprocess.run([prefix / "bin" / "pmtrain", "--version"], cwd=built, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["pmtrain", __version__]), done.stderr
    [package] = prefix.glob("lib/python*/site-packages/protomodels_cli")
    program = "import protomodels_cli; print(protomodels_cli.__file__)"
    done = subprocess.run([prefix / "bin" / "python3", "-c", program], cwd=built, capture_output=True, text=True)
    assert Path(done.stdout.strip()).parent == package
    assert not (prefix / "bin" / "pip").exists()
