"""The files of deploy/: their pmtrain commands are ones that pmtrain takes, and their own tools read them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dockerfile
import pytest
import yaml
from starting import ROOT
from typer.main import get_command

from protomodels_cli.cli.main import app
from protomodels_cli.spec import load_spec

DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
KUBERNETES = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())]
SKYPILOT = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
PODS = [one["spec"]["template"]["spec"] for one in KUBERNETES if one["kind"] == "Job"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Where each is, and what it gives to pmtrain."""
    for unit in UNITS:
        [line] = re.findall(r"^ExecStart=\S+/pmtrain (.+)$", unit.read_text(), re.MULTILINE)
        yield unit.name, shlex.split(line)
    for name, service in COMPOSE.items():
        yield f"compose.yaml-{name}", service["command"]
    for pod in PODS:
        [container] = pod["containers"]
        yield f"kubernetes.yaml-{container['name']}", container["args"]
    yield "skypilot.yaml", shlex.split(SKYPILOT["run"], comments=True)[1:]


@pytest.mark.parametrize(("where", "words"), [*commands()], ids=[where for where, _ in commands()])
def test_pmtrain_takes_the_command(where, words, monkeypatch):
    """It is parsed, not run. Peers find the link in their environment."""
    monkeypatch.setenv("PMTRAIN_LINK", "pm://…")
    group = get_command(app)
    name, *rest = words
    command = group.commands[name]
    with command.make_context(name, [word for word in rest if word]) as context:
        assert name in ("coordinator", "join")
        assert context.params["spec_file" if name == "coordinator" else "link"]


def test_both_sides_use_the_ports_that_the_images_expose():
    stages = dockerfile.read(ROOT / "Dockerfile")
    for name, target in (("coordinator", "coordinator"), ("peer", "peer-cuda")):
        [port] = stages[target].of("EXPOSE")
        assert COMPOSE[name]["ports"] == [f"{port}:{port}"]
        assert COMPOSE[name]["build"]["target"] == target
        assert COMPOSE[name]["image"].endswith(f":{target}")
    for pod in PODS:
        [user] = stages["runtime"].of("USER")
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (int(user), True)
        assert pod["containers"][0]["image"].partition(":")[2] in stages


def test_the_spec_of_the_manifest_is_one(tmp_path):
    [spec] = [one["data"]["run.yaml"] for one in KUBERNETES if one["kind"] == "ConfigMap"]
    (tmp_path / "run.yaml").write_text(spec)
    [peers] = [one["spec"] for one in KUBERNETES if one["metadata"]["name"] == "pmtrain-peers"]
    assert load_spec(tmp_path / "run.yaml").stages == peers["parallelism"] == peers["completions"]


def accepts(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_reads_the_unit(unit, tmp_path):
    """With a program that is here in place of the installed one: it looks whether that can be executed."""
    (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/pmtrain/bin/pmtrain", sys.executable))
    accepts("systemd-analyze", "verify", "--man=no", tmp_path / unit.name)


def compose_program() -> list[str]:
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def test_compose_reads_its_file():
    if not (program := compose_program()):
        pytest.skip("no docker compose is installed")
    accepts(*program, "-f", DEPLOY / "compose.yaml", "config", PMTRAIN_HOST="203.0.113.7", PMTRAIN_LINK="pm://a:1/b#c")


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="no kubernetes-validate is installed"
)
def test_kubernetes_own_schema_takes_the_manifest():
    accepts(sys.executable, "-m", "kubernetes_validate", "--strict", DEPLOY / "kubernetes.yaml")


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed")
def test_skypilot_reads_its_task(tmp_path):
    given = {**SKYPILOT, "workdir": str(tmp_path), "secrets": dict.fromkeys(SKYPILOT["secrets"], "pm://a:1/b#c")}
    accepts(sys.executable, "-c", f"import sky; sky.Task.from_yaml_config({given!r})", HOME=str(tmp_path))
